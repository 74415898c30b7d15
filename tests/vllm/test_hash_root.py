"""Every start of an engine hashes the same tokens alike, whatever its release draws at random."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from kvoffd_client.vllm import hash_root
from kvoffd_client.vllm.metadata import RankAnnouncement
from kvoffd_client.vllm.scheduler_side import SchedulerSide
from kvoffd_client.vllm.start import Start
from tests.vllm.stand_ins import cache_config, engine_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TREE = Path(__file__).resolve().parents[2]
# Of the two that are served.
ALGORITHM = "sha256"


def start(model: Path, seed: str | None = None) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    return subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.identity_process", str(model)],
        cwd=TREE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("weights")
    (found / "model.safetensors").write_bytes(b"weights")
    return found


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    """Two fresh processes without a seed and one with; loading vLLM is what takes its time."""
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as started:
        processes = [started.enter_context(start(folder, seed)) for seed in (None, None, "7")]
        for process in processes:
            started.callback(process.kill)
        for process in processes:
            output, complaints = process.communicate(timeout=240)
            assert process.returncode == 0, complaints
            # Libraries may have written lines of their own before.
            found.append(json.loads(output.splitlines()[-1]))
    return found


@pytest.fixture(scope="module")
def without_seed(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two starts by a user who says nothing of seeds."""
    return answers[:2]


@pytest.fixture(scope="module")
def with_seed(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return answers[2]


def test_two_starts_hash_the_same_tokens_alike(without_seed) -> None:
    one, other = without_seed
    assert one["hashes"] == other["hashes"]
    assert one["is_as_declared"] == {"sha256": True, "sha256_cbor": True}


def test_only_a_root_that_would_be_random_is_touched(without_seed) -> None:
    """What vLLM does by itself: else the test above would hold without the connector."""
    one, other = without_seed
    is_random = one["untouched"][ALGORITHM] != other["untouched"][ALGORITHM]
    assert is_random == hash_root.draws_at_random()
    assert (one["settled"], other["settled"]) == (is_random, is_random)
    if not is_random:
        assert one["hashes"] == one["untouched"], "a stable root stays as it is"


def test_a_users_seed_is_kept(without_seed, with_seed) -> None:
    """Its hashes are those of vLLM without us, and of nobody without that seed."""
    assert not with_seed["settled"]
    assert with_seed["hashes"] == with_seed["untouched"]
    assert with_seed["is_as_declared"] == {"sha256": True, "sha256_cbor": True}
    for algorithm, hashes in with_seed["hashes"].items():
        assert not set(hashes) & set(without_seed[0]["hashes"][algorithm])


def test_all_processes_of_an_engine_name_the_same_root(without_seed, with_seed) -> None:
    """Those that have settled the seed, and those that never do; another seed, another root."""
    names = {name for process in without_seed for name in process["declared"]}
    assert len(names) == 1
    assert with_seed["declared"] == ["seed 7", "seed 7"]
    assert "seed 7" not in names


def test_equal_engines_have_equal_namespaces_in_two_processes(without_seed, with_seed) -> None:
    one, other = without_seed
    assert one["namespace"] == other["namespace"]
    assert [
        name
        for (name, value), (_, changed) in zip(
            one["namespace"], with_seed["namespace"], strict=True
        )
        if value != changed
    ] == ["hash_root"]


def test_a_root_that_is_not_the_declared_one_ends_the_offload(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a release made its root before it asked us: its hashes would be found nowhere."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    config = engine_config(
        folder,
        kv_connector_extra_config={"socket": str(folder / "nobody.sock"), "start_wait_s": 0},
    )
    side = SchedulerSide(Start(config, cache_config()))
    side.announced({0: RankAnnouncement("vec 0123", None)})
    try:
        assert side.build_step(_no_work()) is not None, "so far nothing is wrong"
        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"drawn" * 6, raising=False)
        request = SimpleNamespace(
            request_id="r", block_hashes=[b"h" * 32], num_tokens=40, lora_request=None
        )
        assert side.matched_tokens(request, 0) == 0
        assert "root of the engine's block hashes is not the declared one" in caplog.text
        assert side.build_step(_no_work()) is None, "neither lookups nor stores any more"
    finally:
        side.shutdown()


def _no_work() -> SimpleNamespace:
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        preempted_req_ids=None,
    )

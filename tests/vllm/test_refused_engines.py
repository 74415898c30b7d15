"""A real engine that is refused runs as if there were no connector, and its log says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.expectations import status_of
from tests.vllm.rig import Engines, assert_equal, generate, options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deploy.demo.engines import EngineProcess, Interrupts
    from tests.engine.daemon import DaemonProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# Smaller than the prompts: without the window's drops the tokens would be others.
WINDOWED = {
    "hf_overrides": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 64,
    },
    # Two groups share the pool.
    "num_gpu_blocks_override": 80,
}


@pytest.fixture
def engines(
    tmp_path: Path, model: Path, daemon: DaemonProcess, interrupts: Interrupts
) -> Iterator[Engines]:
    daemon.start()
    found = Engines(tmp_path, model, daemon.socket_path, interrupts, in_process=True)
    yield found
    found.close()


def assert_never_offloaded(daemon: DaemonProcess, engine: EngineProcess, reason: str) -> None:
    """While the engine lives: it has no session, stored nothing, and said so."""
    status = status_of(daemon)
    assert status["sessions"] == 1, "only the one that asks"
    assert status["ledger"]["submitted"] == 0
    assert f"kvoffd: this engine runs without offload: {reason}" in engine.log.read_text()


def test_a_model_with_a_sliding_window_runs_without_offload(
    engines: Engines, daemon: DaemonProcess, expected: dict[str, list[int]]
) -> None:
    """Its old blocks are dropped under a store, and a prefix would lack some of its layers."""
    plain = engines.start("plain", kv_transfer_config=None, **WINDOWED)
    wanted = [answer["tokens"] for _, answer in generate(plain)]
    plain.stop()
    assert wanted != list(expected.values())[: len(wanted)], "the window was to matter"
    refused = engines.start("refused", **WINDOWED)
    for _ in range(2):
        assert [answer["tokens"] for _, answer in generate(refused)] == wanted
        assert refused.ask("drop_cache")["dropped"]
    assert_never_offloaded(daemon, refused, "the model has 2 KV cache groups and one is supported")
    assert refused.stop() == 0


def test_a_misspelt_setting_is_named_and_the_engine_runs(
    engines: Engines, daemon: DaemonProcess, model: Path, expected: dict[str, list[int]]
) -> None:
    """A salt that was meant and not understood must not be a missing one."""
    transfer: dict[str, Any] = options(model, daemon.socket_path)["kv_transfer_config"]
    transfer["kv_connector_extra_config"] |= {"slat": "tenant"}
    refused = engines.start("refused", kv_transfer_config=transfer)
    assert_equal(refused, expected)
    assert refused.ask("drop_cache")["dropped"]
    assert_equal(refused, expected)
    assert_never_offloaded(
        daemon, refused, "kv_connector_extra_config has no setting 'slat'; known: "
    )
    assert refused.stop() == 0

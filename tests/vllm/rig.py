"""Prompts, engines and expectations that the tests with a real vLLM share.

Engines are processes (deploy/demo/engine_process.py), started on the model that conftest.py
makes once a run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.demo.engines import EngineProcess, Interrupts
from tests.engine.daemon import DaemonProcess, wait_a_little
from tests.vllm.expectations import status_of

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_TOKENS = 32
ANSWER_TOKENS = 16
DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo"


@dataclass(frozen=True)
class Case:
    """One prompt, and how many of its and its answer's tokens must come back as hits."""

    name: str
    prompt: list[int]

    @property
    def hit_tokens(self) -> int:
        """All whole blocks of tokens that have KV: the final sampled token has none."""
        computed = len(self.prompt) + ANSWER_TOKENS - 1
        return computed // BLOCK_TOKENS * BLOCK_TOKENS


def cases() -> list[Case]:
    """Prompts whose ends lie on every side of a block's boundary; some share a beginning."""
    drawn = random.Random(7)

    def words(count: int) -> list[int]:
        return [drawn.randrange(500) for _ in range(count)]

    opening = words(3 * BLOCK_TOKENS + 5)
    return [
        # The block is completed by the last token that has KV, in the request's last step.
        Case("ends with the last computed token", words(5 * BLOCK_TOKENS - ANSWER_TOKENS + 1)),
        # One token more would have completed it: the final sampled token never has KV.
        Case("ends with the final sampled token", words(5 * BLOCK_TOKENS - ANSWER_TOKENS)),
        Case("a prompt of whole blocks", words(4 * BLOCK_TOKENS)),
        Case("longer than one step", words(11 * BLOCK_TOKENS + 3)),
        Case("a shared beginning", opening + words(40)),
        Case("the same beginning again", opening + words(70)),
    ]


class Engines:
    """The engines of one test; all are gone when it ends."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        socket: Path,
        interrupts: Interrupts,
        *,
        in_process: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = environment
        self._folder = folder
        self._interrupts = interrupts
        self._options = options(model, socket)
        self._in_process = in_process
        self._started: list[EngineProcess] = []

    def start(self, name: str, **more: Any) -> EngineProcess:
        engine = EngineProcess(
            name,
            self._folder,
            self._interrupts,
            in_process=self._in_process,
            environment=self._environment,
        )
        self._started.append(engine)
        engine.start(self._options | more)
        return engine

    def close(self) -> None:
        for engine in self._started:
            engine.kill()


def options(model: Path, socket: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": 40,
        # Some releases ask for most of the memory before they look at the override.
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if socket is not None:
        found["kv_transfer_config"] = {
            "kv_connector": "KvoffdConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvoffd_client.vllm",
            "kv_connector_extra_config": {
                "socket": str(socket),
                "strict": True,
                # What is a hit must not depend on how busy this machine is.
                "lookup_deadline_s": 30,
                "load_deadline_s": 60,
                "heartbeat_timeout_s": 60,
                "start_wait_s": 60,
            },
            "kv_load_failure_policy": "recompute",
        }
    return found


def crowded() -> list[list[int]]:
    """Requests that fit when they begin, and no longer when they grow: some are preempted."""
    drawn = random.Random(11)
    return [[drawn.randrange(500) for _ in range(12 * BLOCK_TOKENS - 4)] for _ in range(6)]


def generate(engine: EngineProcess) -> list[tuple[Case, dict[str, Any]]]:
    wanted = cases()
    reply = engine.ask(
        "generate", prompts=[case.prompt for case in wanted], max_tokens=ANSWER_TOKENS
    )
    return list(zip(wanted, reply["answers"], strict=True))


def assert_all_hit(
    daemon: DaemonProcess,
    engine: EngineProcess,
    expected: dict[str, list[int]],
    time: int = 0,
    ranks: int = 1,
) -> None:
    """Each conversation goes on by a block: exactly the computed blocks before it are hits.

    That computes the final sampled token of before, so from the second time on its block is
    a hit as well. What follows differs from time to time, and is a miss.

    The daemon's own count says where they came from: before 0.28 vLLM forgets the hits of
    steps without an output.
    """
    for case in cases():
        assert engine.ask("drop_cache")["dropped"], f"the own cache stays before {case.name!r}"
        before = status_of(daemon)["cache"]["loaded_blocks"]
        longer = case.prompt + expected[case.name] + [1 + time] * BLOCK_TOKENS
        talk_tokens = len(case.prompt) + ANSWER_TOKENS
        hit_tokens = case.hit_tokens if time == 0 else talk_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        reply = engine.ask("generate", prompts=[longer], max_tokens=1)
        seen = (case.name, reply["answers"][0]["cached_tokens"])
        assert seen == (case.name, hit_tokens), f"{daemon.last_words()}\n{engine.last_words()}"
        loaded = status_of(daemon)["cache"]["loaded_blocks"] - before
        assert (case.name, loaded * BLOCK_TOKENS) == (case.name, hit_tokens * ranks)


def assert_equal(engine: EngineProcess, expected: dict[str, list[int]]) -> None:
    for case, answer in generate(engine):
        assert (case.name, answer["tokens"]) == (case.name, expected[case.name])


def assert_crowd_equal(engine: EngineProcess, expected: dict[str, list[int]]) -> None:
    reply = engine.ask("generate", prompts=crowded(), max_tokens=48, together=True)
    for index, answer in enumerate(reply["answers"]):
        name = f"crowd {index}"
        assert (name, answer["tokens"]) == (name, expected[name])
    assert reply["counters"]["preemptions"] > 0, "this pool was to be too small"


def wait_until_registered(daemon: DaemonProcess, engine: EngineProcess) -> None:
    """The engine finds the daemon by itself; its back-off is at most 5 s."""
    for _ in range(600):
        if status_of(daemon)["sessions"] >= 3:  # scheduler, rank, and the one that asks
            return
        engine.ask("settle")
        wait_a_little(0.05)
    pytest.fail(f"the engine did not come back:\n{daemon.last_words()}")


def wait_until_busy(daemon: DaemonProcess, before: int) -> None:
    """Until the engine has stored something beyond the `before` blocks."""
    for _ in range(2000):
        if status_of(daemon)["ledger"]["submitted"] > before:
            return
        wait_a_little(0.01)
    pytest.fail("the engine stored nothing")

"""Aborts, dead and frozen parts and resets, with a real vLLM: at worst a miss.

One engine is shared by all of it: whatever befell it before, it must go on and give the same
tokens.
"""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING

import pytest

from tests.engine.daemon import DaemonProcess, wait_a_little
from tests.engine.status import not_idle
from tests.vllm.expectations import assert_idle, status_of, wait_until_stored
from tests.vllm.rig import (
    Engines,
    assert_all_hit,
    assert_crowd_equal,
    assert_equal,
    crowded,
    options,
    wait_until_registered,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deploy.demo.engines import EngineProcess, Interrupts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SETTLE_LOOKS = 400


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    found = DaemonProcess(tmp_path_factory.mktemp("d"), {"KVOFFD_ARENA_BYTES": "256MiB"})
    found.start()
    yield found
    assert found.stop() == 0, found.last_words()


@pytest.fixture(scope="module")
def engine(
    shared_daemon: DaemonProcess,
    model: Path,
    interrupts: Interrupts,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("e")
    engines = Engines(folder, model, shared_daemon.socket_path, interrupts, in_process=True)
    transfer = options(model, shared_daemon.socket_path)["kv_transfer_config"]
    # What is frozen here is to be given up within the test; a busy machine is not to be.
    transfer["kv_connector_extra_config"] |= {
        "load_deadline_s": 5,
        "lookup_deadline_s": 5,
        "heartbeat_timeout_s": 10,
    }
    try:
        found = engines.start("shared", kv_transfer_config=transfer)
        yield found
        found.stop()
        assert_idle(shared_daemon)
    finally:
        engines.close()


def assert_nothing_held(daemon: DaemonProcess, engine: EngineProcess) -> None:
    """While the engine lives: no lease, hold or transfer is left of what it did."""
    for _ in range(SETTLE_LOOKS):
        engine.ask("settle")
        if not_idle(status_of(daemon)).keys() <= {"instances", "sessions"}:
            return
        wait_a_little(0.05)
    pytest.fail(f"{not_idle(status_of(daemon))}\n{daemon.last_words()}")


@pytest.mark.parametrize("seed", range(3))
def test_requests_aborted_at_any_step_leave_nothing_and_harm_nobody(
    shared_daemon: DaemonProcess, engine: EngineProcess, expected: dict[str, list[int]], seed: int
) -> None:
    """While they wait for a lookup, for a load, compute, or have their stores under way."""
    dice = random.Random(seed)
    engine.ask("drop_cache")
    prompts = crowded() * 2
    aborts: list[int | None] = [dice.choice((None, dice.randrange(40))) for _ in prompts]
    reply = engine.ask(
        "generate", prompts=prompts, max_tokens=48, together=True, abort_after_steps=aborts
    )
    for index, (abort, answer) in enumerate(zip(aborts, reply["answers"], strict=True)):
        tokens = expected[f"crowd {index % len(crowded())}"]
        got = answer.get("tokens", [])
        assert got == (tokens if abort is None else tokens[: len(got)])
    assert_nothing_held(shared_daemon, engine)


def copier_pid(daemon: DaemonProcess) -> int:
    (copier,) = status_of(daemon)["copiers"]
    pid: int = copier["pid"]
    return pid


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_copier_that_dies_or_freezes_under_the_work_costs_hits_alone(
    shared_daemon: DaemonProcess,
    engine: EngineProcess,
    expected: dict[str, list[int]],
    end: signal.Signals,
) -> None:
    """Loads that are never proven are computed instead; a new copier serves what comes next."""
    assert_crowd_equal(engine, expected)
    wait_until_stored(shared_daemon, engine)
    engine.ask("drop_cache")
    copier = copier_pid(shared_daemon)
    engine.begin("generate", prompts=crowded(), max_tokens=48, together=True)
    os.kill(copier, end)
    for index, answer in enumerate(engine.finish("generate")["answers"]):
        assert answer["tokens"] == expected[f"crowd {index}"]
    if end is signal.SIGSTOP and copier_pid(shared_daemon) == copier:
        os.kill(copier, signal.SIGCONT)
    assert_nothing_held(shared_daemon, engine)
    assert_equal(engine, expected)


def test_a_frozen_daemon_makes_nobody_wait_and_thaws_into_hits(
    shared_daemon: DaemonProcess, engine: EngineProcess, expected: dict[str, list[int]]
) -> None:
    engine.ask("drop_cache")
    shared_daemon.pause()
    try:
        engine.begin("generate", prompts=crowded(), max_tokens=48, together=True)
        for index, answer in enumerate(engine.finish("generate")["answers"]):
            assert answer["tokens"] == expected[f"crowd {index}"]
        engine.ask("drop_cache")
        assert_equal(engine, expected)
    finally:
        shared_daemon.resume()
    wait_until_registered(shared_daemon, engine)
    engine.ask("drop_cache")
    assert_equal(engine, expected)
    wait_until_stored(shared_daemon, engine)
    assert_all_hit(shared_daemon, engine, expected)


def test_after_a_reset_of_everything_nothing_of_before_is_found(
    shared_daemon: DaemonProcess, engine: EngineProcess, expected: dict[str, list[int]]
) -> None:
    """With its own cache vLLM resets the connector; then the same prompts are computed anew."""
    wait_until_stored(shared_daemon, engine)
    assert engine.ask("drop_cache", connector=True)["dropped"]
    before = status_of(shared_daemon)["cache"]["loaded_blocks"]
    reply = engine.ask("generate", prompts=[crowded()[0]], max_tokens=48)
    (answer,) = reply["answers"]
    assert (answer["tokens"], answer["cached_tokens"]) == (expected["crowd 0"], 0)
    assert status_of(shared_daemon)["cache"]["loaded_blocks"] == before
    assert_nothing_held(shared_daemon, engine)

"""The main job, with the real vLLM of this interpreter: store, lose the own cache, get it back.

Engines are processes (deploy/demo/engine_process.py); "in three" is the shape in which a
server runs: front end, scheduler and rank apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.expectations import assert_idle, status_of, wait_until_stored
from tests.vllm.rig import (
    Engines,
    assert_all_hit,
    assert_crowd_equal,
    assert_equal,
    crowded,
    wait_until_busy,
    wait_until_registered,
)

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.demo.engines import Interrupts
    from tests.engine.daemon import DaemonProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SHAPES = [pytest.param(True, id="in-one-process"), pytest.param(False, id="in-three")]


@pytest.mark.parametrize("in_process", SHAPES)
def test_every_computed_block_is_a_hit_after_all_that_can_befall_an_engine(
    tmp_path: Path,
    model: Path,
    expected: dict[str, list[int]],
    daemon: DaemonProcess,
    interrupts: Interrupts,
    in_process: bool,
) -> None:
    """After a cache drop, a restart and a SIGKILL: all computed blocks hit, tokens are equal."""
    daemon.start()
    engines = Engines(tmp_path, model, daemon.socket_path, interrupts, in_process=in_process)
    try:
        first = engines.start("first")
        assert_equal(first, expected)
        wait_until_stored(daemon, first)
        assert_all_hit(daemon, first, expected)
        assert_crowd_equal(first, expected)
        first.ask("drop_cache")
        assert_crowd_equal(first, expected)
        first.stop()
        assert_idle(daemon)

        second = engines.start("second")
        assert_all_hit(daemon, second, expected, time=1)
        assert_equal(second, expected)
        second.kill()
        assert_idle(daemon)

        third = engines.start("third")
        assert_all_hit(daemon, third, expected, time=2)
        assert_equal(third, expected)
        third.stop()
        assert_idle(daemon)
    finally:
        engines.close()


@pytest.mark.parametrize("in_process", SHAPES)
def test_a_killed_engine_loses_nothing_that_was_stored(
    tmp_path: Path,
    model: Path,
    expected: dict[str, list[int]],
    daemon: DaemonProcess,
    interrupts: Interrupts,
    in_process: bool,
) -> None:
    """The engine that stored is killed, not stopped: its blocks are hits for the next."""
    daemon.start()
    engines = Engines(tmp_path, model, daemon.socket_path, interrupts, in_process=in_process)
    try:
        first = engines.start("first")
        assert_equal(first, expected)
        wait_until_stored(daemon, first)
        first.kill()
        assert_idle(daemon)
        second = engines.start("second")
        assert_all_hit(daemon, second, expected)
        second.stop()
        assert_idle(daemon)
    finally:
        engines.close()


@pytest.mark.parametrize("in_process", SHAPES)
def test_a_daemon_that_is_absent_or_dies_costs_hits_and_nothing_else(
    tmp_path: Path,
    model: Path,
    expected: dict[str, list[int]],
    daemon: DaemonProcess,
    interrupts: Interrupts,
    in_process: bool,
) -> None:
    """Absent at start, there later, killed in mid-run, back again: always the same tokens."""
    engines = Engines(tmp_path, model, daemon.socket_path, interrupts, in_process=in_process)
    try:
        engine = engines.start("first")
        assert_equal(engine, expected)
        engine.ask("drop_cache")

        daemon.start()
        wait_until_registered(daemon, engine)
        assert_equal(engine, expected)
        wait_until_stored(daemon, engine)
        assert_all_hit(daemon, engine, expected)

        # Loads and stores of the crowd are under way when the daemon goes.
        engine.ask("drop_cache")
        before = status_of(daemon)["ledger"]["submitted"]
        engine.begin("generate", prompts=crowded(), max_tokens=48, together=True)
        wait_until_busy(daemon, before)
        daemon.kill()
        reply = engine.finish("generate")
        for index, answer in enumerate(reply["answers"]):
            assert answer["tokens"] == expected[f"crowd {index}"]
        engine.ask("drop_cache")
        assert_equal(engine, expected)

        daemon.start()
        wait_until_registered(daemon, engine)
        engine.ask("drop_cache")
        assert_equal(engine, expected)
        wait_until_stored(daemon, engine)
        assert_all_hit(daemon, engine, expected)
        engine.stop()
        assert_idle(daemon)
    finally:
        engines.close()

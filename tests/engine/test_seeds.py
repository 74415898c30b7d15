"""Three engines of two ranks share one daemon, under many seeds: never a wrong byte.

At the end of each seed the accounts agree and nothing is held. A failure says how to see it
again: python -m tests.engine.replay SEED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.crew import Crew

FEW = range(20)
ALL = range(200)
MORE = range(300, 340)
REACHED = (
    "stored",
    "present",
    "loads",
    "loaded_tokens",
    "evicted_blocks",
    "preemptions",
    "aborts",
    "aborted_loads",
    "raised",
    "resets",
    "steps_without_forward",
    "rejected no_slot",
)


@pytest.mark.parametrize("seed", FEW)
def test_no_wrong_byte_and_nothing_lost(crew: Crew, seed: int) -> None:
    crew.run_seed(seed).require()


def test_the_seeds_reach_what_they_are_for(crew: Crew) -> None:
    """All that is to happen has happened in this process's seeds of before, or in some more."""
    more = iter(MORE)
    while never := [name for name in REACHED if not crew.totals.get(name)]:
        seed = next(more, None)
        assert seed is not None, (never, crew.totals)
        crew.run_seed(seed).require()


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [seed for seed in ALL if seed not in FEW])
def test_no_wrong_byte_and_nothing_lost_in_all_seeds(crew: Crew, seed: int) -> None:
    crew.run_seed(seed).require()

"""The same engines while copier, daemon or an engine is killed or stopped under them.

A fault may cost hits and stores, counted; it never costs a byte, a request or a hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.faults import FAULTS, Fault

if TYPE_CHECKING:
    from tests.engine.crew import Crew

FEW = range(1000, 1001)
MORE = range(1001, 1020)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_hits_and_nothing_else(fresh_crew: Crew, kind: str, seed: int) -> None:
    fault = Fault(kind, seed)
    fresh_crew.run_seed(seed, fault).require()
    assert fault.times > 0, "the fault never came; its step is too late"


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", MORE)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_hits_and_nothing_else_in_more_seeds(
    fresh_crew: Crew, kind: str, seed: int
) -> None:
    fault = Fault(kind, seed)
    fresh_crew.run_seed(seed, fault).require()
    assert fault.times > 0, "the fault never came; its step is too late"

"""The oracle can fail: every defect put into the halves on purpose is found.

The defects: fences ignored, doorbell rung before a draft forward, failed loads reported as
good, stores of a forward that raised published, the final sampled token's block stored, a reset
forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.defects import DEFECTS
from tests.engine.faults import Fault

if TYPE_CHECKING:
    from tests.engine.crew import Crew

# Most defects show in the first seed; a race may need a few.
SEEDS_MAX = 8


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_defect_of_the_halves_is_found(crew: Crew, name: str) -> None:
    for seed in range(2000, 2000 + SEEDS_MAX):
        # A copier that is stopped now and then reads late: what fences are for.
        fault = Fault("copier-pause", seed) if name == "ignores-fences" else None
        findings = crew.run_seed(seed, fault, defect=name).findings
        if any("WrongBytes" in finding for finding in findings):
            return
    pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")

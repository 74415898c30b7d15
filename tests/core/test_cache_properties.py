"""The core against the oracle, in programs that hypothesis makes up."""

from core.cache_machine import CacheMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

# 300 programs of 40 steps take about twenty seconds.
PROGRAMS = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def test_no_program_reads_a_wrong_byte_or_loses_a_block():
    """Rules: cache_oracle.py for what is visible, kvoffd/core/invariants.py for what is not."""
    run_state_machine_as_test(CacheMachine, settings=PROGRAMS)

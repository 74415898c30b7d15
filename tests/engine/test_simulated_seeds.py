"""The halves over a simulated daemon: many seeds in the time of a few real ones.

Engines of a seed run one after another over one simulated daemon, so that the later ones find
what the earlier ones stored.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvoffd_client.engine.rank import RankHalf
from kvoffd_client.engine.scheduler import SchedulerHalf
from kvoffd_client.engine.types import RankOptions, SchedulerOptions
from kvoffd_client.memory import SharedMemory
from kvoffd_client.tickets import TicketPage
from tests.engine.defects import DEFECTS, Defect
from tests.engine.engine import TestEngine
from tests.engine.pool import Pool, WrongBytes, regions_of
from tests.engine.simulated import SimulatedDaemon, SimulatedRank, SimulatedScheduler
from tests.engine.workload import Plan, plan_of

SEEDS = range(20)
MORE_SEEDS = range(20, 600)
SEEDS_MAX = 30
TICKET_CELLS = 256
ENGINES = 2


class SimulatedInstance:
    """Halves over simulated ports; time is the number of turns."""

    def __init__(self, plan: Plan, daemon: SimulatedDaemon, defect: Defect) -> None:
        self._now_s = 0.0
        self.scheduler_port = SimulatedScheduler(daemon, plan.salt, plan.ranks, self.clock)
        self._scheduler = SchedulerHalf(
            self.scheduler_port,
            plan.shape.block_tokens,
            SchedulerOptions(ranks_total=plan.ranks, strict=True, resend_pause_s=0.004),
            self.clock,
        )
        self.scheduler_half: Any = defect.scheduler(self._scheduler)
        self.pools: list[Pool] = []
        self.rank_halves: list[Any] = []
        self._ranks: list[RankHalf] = []
        self.ports: list[SimulatedRank] = []
        self._tickets: list[TicketPage] = []
        self._memories: list[SharedMemory] = []
        jobs: dict[int, Any] = {}
        for rank in range(plan.ranks):
            memories = [
                SharedMemory.create(f"simulated-{rank}", size) for size in regions_of(plan.shape)[1]
            ]
            self._memories += memories
            pool = Pool(plan.shape, rank, [memoryview(memory.buffer) for memory in memories])
            tickets = TicketPage.create(TICKET_CELLS)
            self._tickets.append(tickets)
            port = SimulatedRank(daemon, plan.salt, plan.ranks, pool, tickets)
            port.jobs = jobs
            half = RankHalf(port, tickets, RankOptions(rank=rank, strict=True), self.clock)
            self.pools.append(pool)
            self.ports.append(port)
            self._ranks.append(half)
            self.rank_halves.append(defect.rank(half))

    def clock(self) -> float:
        return self._now_s

    def turn(self, _number: int) -> None:
        """Between two steps: 2 ms pass, and the daemon gets on."""
        self._now_s += 0.002
        self.scheduler_port.turn()
        for port in self.ports:
            port.turn()

    def jobs_in_flight(self) -> int:
        scheduler = self._scheduler.statistics()
        ranks = [half.statistics() for half in self._ranks]
        return (
            scheduler.ledger.in_flight
            + scheduler.loads_outstanding
            + sum(rank.ledger.in_flight + rank.loads_outstanding for rank in ranks)
        )

    def assert_balanced(self) -> None:
        self._scheduler.assert_balanced()
        for half in self._ranks:
            half.assert_balanced()

    def close(self) -> None:
        for port in self.ports:
            port.close()
        for pool in self.pools:
            pool.close()
        for tickets in self._tickets:
            tickets.close()
        for memory in self._memories:
            memory.close()


def run_seed(
    seed: int, defect: Defect, total: dict[str, int] | None = None, lost: float = 0.04
) -> None:
    daemon = SimulatedDaemon(seed, lost=lost)
    for engine in range(ENGINES):
        plan = defect.plan(plan_of(seed, engine, token_bytes=64))
        instance = SimulatedInstance(plan, daemon, defect)
        try:
            found = TestEngine(plan, instance, instance.turn, forward_s=0.0)
            for rank in found.ranks:
                rank.before_draft = partial(instance.turn, 0)
            found.run()
            instance.assert_balanced()
            for name, count in (found.counts | found.scheduler.counts).items():
                if total is not None:
                    total[name] = total.get(name, 0) + count
        finally:
            instance.close()
    assert daemon.leases == {}, f"seed {seed}: leases are left: {daemon.leases}"


@pytest.mark.parametrize("seed", SEEDS)
def test_no_wrong_byte_and_nothing_lost_over_a_simulated_daemon(seed: int) -> None:
    run_seed(seed, Defect())


@pytest.mark.stress
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_no_wrong_byte_and_nothing_lost_over_a_simulated_daemon_in_more_seeds(seed: int) -> None:
    run_seed(seed, Defect())


class RaisesOnOneRank(Defect):
    """Nothing of ours is broken; the engine's forward raises on its second rank alone."""

    name = "raises-on-one-rank"

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, raises=dict.fromkeys(range(3, 160, 5), (1,)))


@pytest.mark.parametrize("seed", range(3000, 3010))
def test_a_forward_that_raised_on_one_rank_is_never_stored_by_a_second_try(seed: int) -> None:
    """The other rank lost its connection, which alone would be a reason to send again."""
    run_seed(seed, RaisesOnOneRank(), lost=0.5)


def test_the_simulated_seeds_reach_what_they_are_for() -> None:
    total: dict[str, int] = {}
    for seed in range(500, 508):
        run_seed(seed, Defect(), total)
    never = {name for name, count in total.items() if count == 0 and name != "resets_unconfirmed"}
    assert never == set(), total


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_defect_is_found_over_a_simulated_daemon(name: str) -> None:
    for seed in range(2000, 2000 + SEEDS_MAX):
        try:
            run_seed(seed, DEFECTS[name])
        except WrongBytes:
            return
    pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")

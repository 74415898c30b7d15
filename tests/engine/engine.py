"""One instance of the test engine under one plan: the loop, and the oracle's looks.

Owns nothing but the order of things. Engine thread, like everything it calls.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from tests.engine.daemon import wait_a_little
from tests.engine.request import Request, Status
from tests.engine.scheduler import EngineScheduler, EngineStep
from tests.engine.worker import EngineRank, RankAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd_client.engine.rank import RankHalf
    from kvoffd_client.engine.scheduler import SchedulerHalf
    from tests.engine.pool import Pool
    from tests.engine.workload import Plan

# A seed's work takes a second or two on a free machine, and a machine is rarely free.
RUN_DEADLINE_S = 90.0
# After the last request: the longest deadline of a job in the daemon, and some air.
SETTLE_DEADLINE_S = 45.0


class Instance(Protocol):
    """The product's side of an engine: halves over sessions, and the memory they registered."""

    scheduler_half: SchedulerHalf
    rank_halves: list[RankHalf]
    pools: list[Pool]

    def jobs_in_flight(self) -> int: ...


class EngineStuck(AssertionError):
    """A request or a job did not end; nothing may be able to hold an engine up."""


class TestEngine:
    """Runs a plan to its end, checking every byte on the way."""

    __test__ = False

    def __init__(
        self,
        plan: Plan,
        instance: Instance,
        on_step: Callable[[int], None] = lambda _number: None,
        *,
        forward_s: float | None = None,
    ) -> None:
        self._plan = plan
        self._instance = instance
        self._on_step = on_step
        self._waits = forward_s is None
        self.scheduler = EngineScheduler(plan, instance.scheduler_half)
        self.scheduler.on_received = self._received
        self.ranks = [
            EngineRank(half, pool, plan.habits, forward_s)
            for half, pool in zip(instance.rank_halves, instance.pools, strict=True)
        ]
        self._weights = 0
        self._number = 0
        self._named: dict[str, set[int]] = {}
        self._alive: list[Request] = []
        self.counts: dict[str, int] = dict.fromkeys(
            (
                "steps",
                "steps_without_forward",
                "raised",
                "resets",
                "resets_unconfirmed",
                "loaded_tokens",
                "checked_loads",
            ),
            0,
        )

    def run(self) -> None:
        """All arrivals until the last request has ended, then until the last job has.

        Raises:
            WrongBytes: the oracle's finding.
            EngineStuck: something did not end in time.
        """
        ends_s = time.monotonic() + RUN_DEADLINE_S
        last = max(arrival.step for arrival in self._plan.arrivals)
        while self._number <= last or self.scheduler.has_work:
            self._mishaps()
            self._step()
            if time.monotonic() > ends_s:
                raise EngineStuck(f"after {RUN_DEADLINE_S} s: {self._unfinished()}")
        self.settle()

    def settle(self) -> None:
        """Steps without work, as a serving loop takes them, until no job is in flight."""
        ends_s = time.monotonic() + SETTLE_DEADLINE_S
        while self._instance.jobs_in_flight() > 0 or self.scheduler.has_work:
            self._step()
            if time.monotonic() > ends_s:
                raise EngineStuck(
                    f"{self._instance.jobs_in_flight()} jobs in flight after "
                    f"{SETTLE_DEADLINE_S} s; {self._unfinished()}"
                )
        assert self.scheduler.table.all_free, "blocks are held without a request"

    def _mishaps(self) -> None:
        number = self._number
        for index, arrival in enumerate(self._plan.arrivals):
            if arrival.step == number:
                self._alive.append(self.scheduler.add(f"{index}", arrival))
        for request in self._alive:
            after = request.arrival.abort_after
            if after is not None and number >= request.arrival.step + after:
                self.scheduler.abort(request)
        self._alive = [one for one in self._alive if one.status is not Status.FINISHED]
        if number in self._plan.drops:
            self.scheduler.drop_prefix_cache()
        if number in self._plan.resets:
            self.counts["resets"] += 1
            if not self.scheduler.reset():
                self.counts["resets_unconfirmed"] += 1
            self._weights += self._plan.reset_changes_weights

    def _step(self) -> None:
        number = self._number
        self._number += 1
        self._on_step(number)
        self.counts["steps"] += 1
        step = self.scheduler.schedule(number, paused=number in self._plan.pauses)
        raising = self._plan.raises.get(number, ()) if step.forwards else ()
        answers = [
            rank.execute(step, self.scheduler, self._weights, raises=index in raising)
            for index, rank in enumerate(self.ranks)
        ]
        if any(answer.raised for answer in answers):
            self.counts["raised"] += 1
            self._take(EngineStep(number), answers)
            self.scheduler.undo(step)
        else:
            self._take(step, answers)
        for rank in self.ranks:
            rank.pool.audit(self.scheduler.loading_blocks, f"after step {number}")
        if not step.forwards:
            self.counts["steps_without_forward"] += 1
            if self._waits:
                # A real engine's threads would be idle or in native code, without the GIL.
                wait_a_little(0.001)

    def _take(self, step: EngineStep, answers: list[RankAnswer]) -> None:
        """Aggregate as vLLM: failed blocks at once, a request when all ranks have named it."""
        failed: set[int] = set()
        received: list[str] = []
        report: Any = None
        for index, answer in enumerate(answers):
            failed |= answer.failed_blocks
            for request_id in answer.received:
                named = self._named.setdefault(request_id, set())
                assert index not in named, f"rank {index} named {request_id} twice"
                named.add(index)
                if len(named) == len(self.ranks):
                    received.append(request_id)
                    del self._named[request_id]
            if answer.report is not None:
                report = answer.report if report is None else report.merged(answer.report)
        self.scheduler.update(step, failed, received, report)

    def _received(self, request: Request, destinations: list[int]) -> None:
        """The moment of truth for a load: proven bytes are the right ones, on every rank."""
        good = request.status is Status.LOADING
        for rank in self.ranks:
            for block in destinations:
                rank.pool.accept(block)
            if good:
                rank.pool.check_tokens(
                    request.chain,
                    request.blocks,
                    request.computed,
                    self._weights,
                    f"load of {request.request_id}",
                )
        if good:
            self.counts["checked_loads"] += 1
            self.counts["loaded_tokens"] += max(0, request.computed - request.loading_from)

    def _unfinished(self) -> str:
        return ", ".join(
            f"{one.request_id} {one.status.value} computed {one.computed} of {one.tokens_total}"
            for one in self.scheduler.requests.values()
        )

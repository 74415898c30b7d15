"""The rank half: hands a step's orders to the session, rings the bell, and proves what ended.

Owns the rank's jobs, its ticket page and its ledger. All methods belong to the
engine's rank thread and none waits. None raises in production: a fault of ours
turns the half off; loads that are out then still end by proof.

Call order a step: handle_fences, start_loads (before or after the forward),
finish_step (any number of times), take_failed_blocks, take_report, end_step
(which may be missing: the next handle_fences makes up for it).
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from kvoffd_client.engine.guard import Guard
from kvoffd_client.engine.load_table import OFF, LoadTable
from kvoffd_client.engine.metadata import (
    NO_FINISHED_LOADS,
    FinishedLoads,
    RankReport,
    StepMetadata,
    StoreEnd,
    StoreOrder,
)
from kvoffd_client.engine.store_book import FORWARD_RAISED, NO_TICKET
from kvoffd_client.engine.types import RankOptions, RankStatistics
from kvoffd_client.ledger import Ledger
from kvoffd_client.ports import (
    LOADS_PART,
    Completions,
    LoadWork,
    RankPort,
    Reason,
    ReasonCount,
    Step,
    StoreResult,
    StoreWork,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvoffd_client.tickets import TicketPage


def _exception_in_flight() -> int | None:
    """Which exception is being handled, if any; within a `finally`, the one that passes by."""
    exception = sys.exc_info()[1]
    return None if exception is None else id(exception)


# Job ids remembered one by one, so that no job is handed over twice in whatever order hooks
# come; older ones count as handed over. Far more than the jobs of all steps under way.
_SEEN_JOBS_MAX = 65_536


class _SeenJobs:
    """Which job ids were taken up already; bounded."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._order: deque[int] = deque()
        self._floor = 0

    def add(self, job_id: int) -> bool:
        """Whether it is new."""
        if job_id <= self._floor or job_id in self._ids:
            return False
        self._ids.add(job_id)
        self._order.append(job_id)
        if len(self._order) > _SEEN_JOBS_MAX:
            oldest = self._order.popleft()
            self._ids.discard(oldest)
            self._floor = max(self._floor, oldest)
        return True

    def __contains__(self, job_id: int) -> bool:
        return job_id <= self._floor or job_id in self._ids


class RankHalf:
    """One rank's half."""

    def __init__(
        self,
        session: RankPort,
        tickets: TicketPage,
        options: RankOptions,
        clock: Callable[[], float],
    ) -> None:
        self._port = session
        self._tickets = tickets
        self._options = options
        self._guard = Guard(f"rank half {options.rank}", strict=options.strict)
        self._ledger = Ledger()
        self._loads = LoadTable(session, tickets, options.rank, options.load_deadline_s, clock)
        self._seen = _SeenJobs()
        self._cell_of_store: dict[int, int] = {}
        #: Fenced before they came up for hand-over.
        self._cancelled: set[int] = set()
        self._revoked_hints: list[int] = []
        self._store_ends: list[StoreEnd] = []
        self._failed_blocks: set[int] = set()
        self._step_is_open = False
        self._outer_exception: int | None = None

    # --- Hooks -------------------------------------------------------------------------

    def handle_fences(self, metadata: StepMetadata | None) -> None:
        """First hook of a step, before anything overwrites a block. Takes microseconds."""
        try:
            if self._step_is_open:
                # The former step's last hook never came; its work is ordered before this one.
                self._tickets.ring()
            self._step_is_open = True
            self._outer_exception = _exception_in_flight()
            if metadata is None:
                self._guard.misuse("handle_fences was called without metadata")
                return
            for job_id in metadata.fences:
                self._fence(job_id)
            for job_id in metadata.doomed_loads:
                self._loads.doom(job_id)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._turn_off("handle_fences")

    def start_loads(self, metadata: StepMetadata | None) -> None:
        """Hand the step's loads over, each once."""
        try:
            if metadata is None:
                self._guard.misuse("start_loads was called without metadata")
                return
            if metadata.loads:
                self._start_loads(metadata)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._turn_off("start_loads")
            self._end_loads(metadata)

    def finish_step(self, metadata: StepMetadata | None) -> FinishedLoads:
        """The unconditional hook: hand the step's stores over, each once, and see what ended."""
        try:
            if metadata is None:
                self._guard.misuse("finish_step was called without metadata")
            elif metadata.stores or metadata.loads:
                self._hand_over(metadata)
            if self._revoked_hints:
                self._send(())
            if self._cell_of_store or self._loads:
                self._drain(self._port.drain())
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._turn_off("finish_step")
            self._end_loads(metadata)
        return self._take_finished()

    def take_late_stores(self, metadata: StepMetadata) -> None:
        """Hand over stores decided between two steps, by the scheduler half on this thread."""
        try:
            self._hand_over(metadata)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._turn_off("take_late_stores")

    def end_step(self) -> None:
        """Last hook of a step: everything of it is computed, so its stores may be copied."""
        if self._step_is_open:
            self._step_is_open = False
            self._tickets.ring()

    def take_failed_blocks(self) -> set[int]:
        """Blocks of failed loads among those that `finish_step` has reported; each once."""
        if not self._failed_blocks:
            return set()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> RankReport | None:
        """What ended since the last report; None when nothing did."""
        load_ends = self._loads.take_ends()
        if not load_ends and not self._store_ends:
            return None
        store_ends, self._store_ends = self._store_ends, []
        return RankReport(tuple(store_ends), load_ends)

    def shutdown(self) -> None:
        """The engine ends: hand over what is left, within the session's bound."""
        try:
            self.end_step()
            self._port.close()
            self._drain(self._port.drain())
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._turn_off("shutdown")

    def statistics(self) -> RankStatistics:
        return RankStatistics(
            ledger=self._ledger.totals(),
            loads=self._loads.begun,
            loads_failed=dict(self._loads.failed),
            loads_outstanding=len(self._loads),
            loads_unproven=self._loads.unproven,
            misuses=self._guard.misuses,
            is_off=self._guard.is_off,
        )

    def assert_balanced(self) -> None:
        """Raise AssertionError when the conservation law does not hold."""
        self._ledger.assert_balanced()

    # --- Fences --------------------------------------------------------------------------

    def _fence(self, job_id: int) -> None:
        cell = self._cell_of_store.get(job_id)
        if cell is not None:
            self._tickets.revoke(cell)
            self._revoked_hints.append(job_id)
        elif job_id not in self._seen:
            self._cancelled.add(job_id)

    # --- Hand-over -----------------------------------------------------------------------

    def _start_loads(self, metadata: StepMetadata) -> None:
        works: list[LoadWork] = []
        for order in metadata.loads:
            if not self._seen.add(order.job_id):
                continue
            if self._guard.is_off:
                self._loads.refuse(order, OFF)
                continue
            try:
                work = self._loads.begin(order)
            except Exception:
                self._loads.refuse(order, OFF)
                raise
            if work is None:
                continue
            works.append(work)
            if order.job_id in metadata.doomed_loads:
                self._loads.doom(order.job_id)
        if works:
            self._port.hand_over(Step(loads=tuple(works)))

    def _hand_over(self, metadata: StepMetadata) -> None:
        if metadata.loads:
            # A driver that left start_loads out; usually all of them were seen.
            self._start_loads(metadata)
        raised = _exception_in_flight() not in {None, self._outer_exception}
        works: list[StoreWork] = []
        for order in metadata.stores:
            if not self._seen.add(order.job_id):
                continue
            self._ledger.submit(order.job_id, len(order.block_ids))
            if order.job_id in self._cancelled:
                self._cancelled.discard(order.job_id)
                self._fail(order, Reason.REVOKED)
            elif raised:
                # Nobody knows which of the blocks were written.
                self._fail(order, FORWARD_RAISED)
            elif self._guard.is_off:
                self._fail(order, OFF)
            else:
                work = self._store_work(order)
                if work is None:
                    self._fail(order, NO_TICKET)
                else:
                    works.append(work)
        if works:
            self._send(works)

    def _store_work(self, order: StoreOrder) -> StoreWork | None:
        if self._tickets.cells_free <= self._tickets.cells // LOADS_PART:
            return None
        cell = self._tickets.allocate(order.job_id)
        if cell is None:
            return None
        self._cell_of_store[order.job_id] = cell
        return StoreWork(
            order.job_id,
            order.generation,
            order.group,
            cell,
            # Between two steps all that was computed is ordered already.
            self._tickets.next_bell if self._step_is_open else self._tickets.bell,
            order.parent_hash,
            order.block_hashes,
            order.block_ids,
        )

    def _send(self, stores: Iterable[StoreWork]) -> None:
        hints, self._revoked_hints = tuple(self._revoked_hints), []
        self._port.hand_over(Step(stores=tuple(stores), revoked_job_ids=hints))

    # --- What ended ------------------------------------------------------------------------

    def _drain(self, completions: Completions) -> None:
        for result in completions.stores:
            cell = self._cell_of_store.pop(result.job_id, None)
            if cell is None:
                self._guard.misuse(f"the session ended store job {result.job_id} twice")
                continue
            # Given up before the result is told: from now on a copy that still runs is void.
            self._tickets.free(cell)
            self._settle(result)
        for load_result in completions.loads:
            self._loads.hear(load_result)
        self._loads.work()

    def _fail(self, order: StoreOrder, reason: str) -> None:
        count = (ReasonCount(reason, len(order.block_ids)),)
        self._settle(StoreResult(order.job_id, failed=count, from_daemon=False))

    def _settle(self, result: StoreResult) -> None:
        self._ledger.settle(result)
        self._store_ends.append(StoreEnd(self._options.rank, result))

    def _take_finished(self) -> FinishedLoads:
        if not self._loads.has_ended:
            return NO_FINISHED_LOADS
        requests, blocks = self._loads.take_requests()
        self._failed_blocks.update(blocks)
        return FinishedLoads(frozenset(requests), frozenset(blocks))

    def _turn_off(self, hook: str) -> None:
        self._guard.turn_off(hook)
        self._loads.doom_all(OFF)
        # Nobody watches these blocks any more: whatever the copies read is void.
        for cell in self._cell_of_store.values():
            self._tickets.revoke(cell)

    def _end_loads(self, metadata: StepMetadata | None) -> None:
        """After a fault: whatever is broken, loads still end, or their requests never would."""
        try:
            for order in () if metadata is None else metadata.loads:
                if self._seen.add(order.job_id):
                    self._loads.refuse(order, OFF)
            self._loads.work()
        except Exception:  # noqa: BLE001 - the next step tries again
            self._guard.turn_off("end_loads")

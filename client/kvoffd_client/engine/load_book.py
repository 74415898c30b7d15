"""Loads under way over all ranks, and what of them the next step's metadata must say.

Owned by the scheduler half, on the scheduler's thread. A load that the engine
counts on is ordered in any case: without a lease it is *vain*, and every rank
reports its blocks as failed, so that the engine recomputes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffd_client.engine.metadata import LoadEnd, LoadOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvoffd_client.engine.lookups import Admission


@dataclass(slots=True)
class LoadState:
    """A load that not all ranks have reported yet. Of its request it is blocks begin to end - 1."""

    job_id: int
    request_id: str
    lease_id: int | None
    begin: int
    end: int
    ranks_waiting: set[int]
    is_good: bool = True


class LoadBook:
    """Loads by job id."""

    def __init__(self, ranks_total: int, next_job_id: Callable[[], int]) -> None:
        self._ranks_total = ranks_total
        self._next_job_id = next_job_id
        self._loads: dict[int, LoadState] = {}
        self._orders: list[LoadOrder] = []
        self._doomed: dict[int, None] = {}
        self.ordered = 0
        self.failed = 0

    @property
    def outstanding(self) -> int:
        return len(self._loads)

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def order(
        self, request_id: str, admission: Admission, begin: int, block_ids: Sequence[int]
    ) -> int:
        """Order a load of the blocks that a lookup has promised; its job id."""
        end = begin + len(block_ids)
        return self._enter(
            LoadState(0, request_id, admission.lease_id, begin, end, set()),
            admission.generation,
            admission.skip_blocks,
            block_ids,
        )

    def order_vain(self, request_id: str, block_ids: Sequence[int]) -> int:
        """Order a load that every rank ends as failed at once; its job id."""
        return self._enter(LoadState(0, request_id, None, 0, 0, set()), 0, 0, block_ids)

    def _enter(
        self, load: LoadState, generation: int, skip_blocks: int, block_ids: Sequence[int]
    ) -> int:
        load.job_id = self._next_job_id()
        load.ranks_waiting = set(range(self._ranks_total))
        self.ordered += 1
        self._loads[load.job_id] = load
        self._orders.append(
            LoadOrder(
                load.job_id,
                load.request_id,
                generation,
                load.lease_id,
                skip_blocks,
                tuple(block_ids),
            )
        )
        return load.job_id

    def doom(self, job_id: int) -> None:
        """Nobody may use what this load brings; unknown ones have ended already."""
        if job_id in self._loads:
            self._doomed[job_id] = None

    def doom_all(self) -> None:
        for job_id in self._loads:
            self._doomed[job_id] = None

    def take_orders(self) -> tuple[LoadOrder, ...]:
        """What goes into this step's metadata."""
        if not self._orders:
            return ()
        orders, self._orders = tuple(self._orders), []
        return orders

    def take_doomed(self) -> tuple[int, ...]:
        if not self._doomed:
            return ()
        doomed, self._doomed = tuple(self._doomed), {}
        return doomed

    def make_orders_vain(self) -> None:
        """What was ordered in this step, and not handed out yet, is to end as failed."""
        self._orders = [
            LoadOrder(order.job_id, order.request_id, 0, None, 0, order.block_ids)
            for order in self._orders
        ]

    def settle(self, end: LoadEnd) -> tuple[bool, LoadState | None]:
        """One rank's end of a load: whether it was expected, and the load once all have ended."""
        load = self._loads.get(end.job_id)
        if load is None or end.rank not in load.ranks_waiting:
            return False, None
        load.ranks_waiting.remove(end.rank)
        load.is_good = load.is_good and end.reason is None
        if load.ranks_waiting:
            return True, None
        del self._loads[end.job_id]
        self._doomed.pop(end.job_id, None)
        self.failed += not load.is_good
        return True, load

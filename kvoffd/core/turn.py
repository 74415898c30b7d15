"""Turn: what one call into the core has changed so far.

Made by Cache at the start of a call and dropped at its end, when it has become an
immutable Effects. Blocks, Stores and Leases write into it, on the loop thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.plans import Effects, ShardWrite

if TYPE_CHECKING:
    from kvoffd.core.allocator import Extent
    from kvoffd.core.entry import BlockEntry
    from kvoffd.core.jobs import Job
    from kvoffd.core.plans import JobSettled, StorePlan
    from kvoffd.core.types import LeaseId, SlotId, StoreId


class ReclaimSearch:
    """How far the search for an extent of another class has come in this call.

    Nothing gets colder within a call, so an extent that could not be reclaimed once
    is not tried again: that bounds the work of a call however little room there is.
    """

    __slots__ = ("extents", "position", "tries")

    def __init__(self, extents: list[Extent]) -> None:
        self.extents = extents
        self.position = 0
        self.tries = 0


class Turn:
    """Effects in the making, and the work that waits for the end of the call."""

    __slots__ = (
        "aborted",
        "cancelled",
        "decided",
        "expired_leases",
        "freed",
        "protected",
        "protected_jobs",
        "ready",
        "searches",
        "settled",
        "stores",
        "writes",
    )

    def __init__(self) -> None:
        self.freed: list[SlotId] = []
        self.ready: list[SlotId] = []
        self.stores: list[StorePlan] = []
        self.settled: list[JobSettled] = []
        self.cancelled: list[StoreId] = []
        self.expired_leases: list[LeaseId] = []
        #: Attempts that were aborted: their waiters are served when all aborts are done.
        self.aborted: list[BlockEntry] = []
        #: Jobs whose last verdict fell, or that a rank has begun after that.
        self.decided: dict[Job, None] = {}
        #: Held until the end of the call, so that it does not evict its own blocks.
        self.protected: list[BlockEntry] = []
        self.protected_jobs: set[Job] = set()
        #: What each rank of a job is to copy, to be made into one plan.
        self.writes: dict[tuple[Job, int], list[BlockEntry]] = {}
        self.searches: dict[int, ReclaimSearch] = {}

    def effects(self, extents: tuple[tuple[int, int], ...]) -> Effects:
        """All of it, as what the service is to carry out."""
        return Effects(
            freed=tuple(self.freed),
            ready=tuple(self.ready),
            stores=tuple(self.stores),
            settled=tuple(self.settled),
            extents=extents,
            cancelled=tuple(self.cancelled),
            expired_leases=tuple(self.expired_leases),
        )


def shard_writes(entries: list[BlockEntry], rank: int) -> tuple[ShardWrite, ...]:
    """One rank's copies, in the order of the job's blocks."""
    return tuple(
        ShardWrite(entry.position, entry.record(rank))
        for entry in sorted(entries, key=lambda entry: entry.position)
    )

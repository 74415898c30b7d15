"""Answers of the core: what is to be moved or written where. Immutable.

The service carries a plan out and calls the core once more when it is done.
Order within one Effects: slot records of `freed` are written FREE first, then
those of `ready` READY, then those of `stores` WRITING, and only then is a copy
started: a slot freed by an eviction may be in `stores` of the same Effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffd.core.types import (
        JobRef,
        LeaseId,
        LoadId,
        SlotId,
        SlotRecord,
        StoreId,
        UnstoredReason,
    )


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """One block of a job that this rank is to copy into a slot."""

    #: Position of the block in the job.
    block: int
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Copies of one rank for one job, to be closed by commit_store or abort_store."""

    store_id: StoreId
    job: JobRef
    rank: int
    writes: tuple[ShardWrite, ...]


@dataclass(frozen=True, slots=True)
class JobSettled:
    """Every block of a job has its verdict; said once for each rank that began it."""

    job: JobRef
    rank: int
    stored: int
    present: int
    unstored: tuple[tuple[UnstoredReason, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Effects:
    """All that follows from one call into the core."""

    freed: tuple[SlotId, ...] = ()
    ready: tuple[SlotId, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    settled: tuple[JobSettled, ...] = ()
    #: Extents that changed their class: (extent index, slot bytes), 0 for none.
    extents: tuple[tuple[int, int], ...] = ()
    #: Open stores whose blocks are all aborted: their copies may be stopped early.
    cancelled: tuple[StoreId, ...] = ()
    expired_leases: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The prefix hit, and the lease over exactly these blocks (None at 0 hits)."""

    hit_blocks: int
    lease_id: LeaseId | None = None
    lease_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Slots of one rank's shards, in the order of the lease's blocks."""

    load_id: LoadId
    slots: tuple[SlotId, ...]
    length_bytes: int
    #: Of all blocks of the lease.
    group: int


@dataclass(frozen=True, slots=True)
class ResetResult:
    """A namespace's new generation; blocks of the older ones can never be found."""

    generation: int
    blocks_dropped: int
    effects: Effects = field(default_factory=Effects)

"""The nouns of the core: identities, states and the records that others read.

Pure and immutable. Slots, blocks and ranks are plain ints; a namespace is an
int that Cache gave out for a digest and that means nothing outside one process.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

NamespaceId = NewType("NamespaceId", int)
InstanceKey = NewType("InstanceKey", str)
LeaseId = NewType("LeaseId", int)
StoreId = NewType("StoreId", int)
LoadId = NewType("LoadId", int)
SlotId = NewType("SlotId", int)


class BlockKey(NamedTuple):
    """Identity of a block in the index."""

    namespace: NamespaceId
    group: int
    block_hash: bytes


class JobRef(NamedTuple):
    """One store job of one engine; equal for all its ranks, never used again."""

    instance: InstanceKey
    job_id: int


class UnstoredReason(enum.Enum):
    """Why blocks of a job were not stored. Rejected: chosen; failed: tried in vain."""

    NO_SLOT = "no_slot"
    STALE_GENERATION = "stale_generation"
    NOT_COMPLETE = "not_complete"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    REVOKED = "revoked"
    COPIER = "copier"
    DEADLINE = "deadline"
    RANK_LOST = "rank_lost"
    GENERATION_MOVED = "generation_moved"

    @property
    def is_rejection(self) -> bool:
        """True when the daemon chose not to store; False when it tried and failed."""
        return self in _REJECTIONS


_REJECTIONS = frozenset(
    {
        UnstoredReason.NO_SLOT,
        UnstoredReason.STALE_GENERATION,
        UnstoredReason.NOT_COMPLETE,
        UnstoredReason.DRAINING,
        UnstoredReason.OVERLOADED,
    }
)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes and limits of a cache. All bounds are inclusive."""

    extents_total: int
    extent_bytes: int
    #: Slot sizes are rounded up to a multiple of this.
    slot_align_bytes: int
    lease_ttl_s: float
    #: A block not sealed by then is aborted for all its ranks.
    store_deadline_s: float
    leases_max: int
    open_jobs_max: int


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """What a caller may know of one namespace."""

    namespace: NamespaceId
    digest: bytes
    ranks_total: int
    generation: int
    blocks_ready: int
    bytes_used: int


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What the slot table says of a slot in use: whose shard it holds."""

    slot: SlotId
    key: BlockKey
    generation: int
    rank: int
    sequence: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters since the start, and gauges; blocks unless the name says otherwise."""

    blocks_ready: int
    blocks_pending: int
    slots_used: int
    slots_quarantined: int
    bytes_used: int
    extents_used: int
    leases: int
    holds: int
    loads_in_flight: int
    jobs_open: int
    lookups: int
    lookup_blocks: int
    lookup_hit_blocks: int
    evicted_blocks: int
    loaded_blocks: int
    failed_load_blocks: int

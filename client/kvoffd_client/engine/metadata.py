"""What crosses from the scheduler half to the rank halves in a step, and what comes back.

Plain picklable values; engines carry them between their processes. Owns no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffd_client.ports import StoreResult


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A store job, equal for all ranks: consecutive blocks of one prefix."""

    job_id: int
    generation: int
    group: int
    parent_hash: bytes
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load job, equal for all ranks. Without a lease it is to end as failed, at once."""

    job_id: int
    request_id: str
    generation: int
    lease_id: int | None
    skip_blocks: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One step's orders. Steps are numbered from 1.

    `fences` names store jobs of which a block belongs to somebody else from
    this step on. `doomed_loads` are to end as failed even where their bytes
    have come: nobody may use them any more.
    """

    number: int
    stores: tuple[StoreOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    fences: tuple[int, ...] = ()
    doomed_loads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """The end of a store job on one rank."""

    rank: int
    result: StoreResult


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load job on one rank; `reason` is None when it is proven good."""

    rank: int
    job_id: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What ended on one rank, or on several after `merged`, since the last report."""

    stores: tuple[StoreEnd, ...] = ()
    loads: tuple[LoadEnd, ...] = ()

    def merged(self, other: RankReport) -> RankReport:
        """Both reports in one; order means nothing."""
        return RankReport(self.stores + other.stores, self.loads + other.loads)


@dataclass(frozen=True, slots=True)
class FinishedLoads:
    """Requests whose load has ended on this rank, each named once, and the blocks to recompute."""

    request_ids: frozenset[str] = frozenset()
    failed_block_ids: frozenset[int] = frozenset()


NO_FINISHED_LOADS = FinishedLoads()

"""Seats: what the daemon knows of one registered rank, and the jobs it has given.

Plain records of the service, changed on the loop thread by the use case that their
comments name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvoffd.copier.supervisor import Copier
    from kvoffd.core.types import JobRef, LoadId
    from kvoffd.service.instances import Instance
    from kvoffd.service.sessions import Session
    from kvoffd.service.streams import RankStream


class StoreRequest(NamedTuple):
    """A store job as one rank sent it; validated against its seat's shape."""

    job_id: int
    generation: int
    group: int
    ticket_cell: int
    bell: int
    parent_hash: bytes
    hashes: list[bytes]
    block_ids: list[int]


class LoadRequest(NamedTuple):
    """A load job as one rank sent it; validated against its seat's shape."""

    job_id: int
    generation: int
    ticket_cell: int
    bell: int
    lease_id: int
    skip_blocks: int
    block_ids: list[int]
    deadline_s: float


@dataclass(slots=True, eq=False, repr=False)
class RankJob:
    """A store job that one rank has begun and that has not settled (store.py)."""

    ref: JobRef
    seat: Seat
    stream: RankStream
    ticket_cell: int
    bell: int
    group: int
    block_ids: list[int]
    #: Plans of this rank whose copies have not ended.
    copies_open: int = 0
    #: Its stream is gone, so the client has failed it: nothing more is copied for it.
    lost: bool = False


@dataclass(slots=True, eq=False, repr=False)
class OpenLoad:
    """A load that has no outcome yet (load.py)."""

    job_id: int
    load_id: LoadId
    seat: Seat
    stream: RankStream
    group: int
    ticket_cell: int
    bell: int
    slots: bytes
    block_ids: bytes
    deadline_s: float
    #: Set once the copier has it.
    batch_id: int | None = None
    copier_killed: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Seat:
    """One rank of an instance: its session, its pool in a copier, its stream, its jobs."""

    instance: Instance
    rank: int
    session: Session
    copier: Copier
    ticket_cells: int
    pool_blocks: int
    #: Bytes of this rank's shard by group.
    shard_bytes: dict[int, int]
    #: None until the copier has opened it (instances.py).
    pool_id: int | None = None
    #: The session has ended.
    lost: bool = False
    epoch: int | None = None
    stream: RankStream | None = None
    #: By job id, until they have settled (store.py).
    jobs: dict[int, RankJob] = field(default_factory=dict)
    #: Store jobs that were open when the stream before was lost (transfer.py).
    lost_jobs: frozenset[int] = frozenset()
    #: By job id, until they have ended (load.py).
    loads: dict[int, OpenLoad] = field(default_factory=dict)

    @property
    def jobs_in_flight(self) -> int:
        """Jobs without an outcome."""
        return len(self.jobs) + len(self.loads)

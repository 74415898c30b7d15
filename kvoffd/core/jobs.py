"""Jobs and open stores: the records that Stores keeps, and changes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvoffd.core.entry import BlockEntry
from kvoffd.core.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvoffd.core.ledger import Verdict
    from kvoffd.core.namespaces import Namespace
    from kvoffd.core.types import JobRef, StoreId


class StoreRequest(NamedTuple):
    """What one rank says when it begins a job."""

    job: JobRef
    rank: int
    namespace: Namespace
    generation: int
    group: int
    parent_hash: bytes | None
    hashes: tuple[bytes, ...]


class Job:
    """One store job for all its ranks. Compared by identity.

    A block's verdict is what falls once for all ranks; until then `blocks` has the
    attempt that it waits for, its own (`writer` is this job) or another job's.
    """

    __slots__ = (
        "begun",
        "blocks",
        "deadline_s",
        "dropped",
        "generation",
        "group",
        "hashes",
        "held",
        "namespace",
        "no_slot_from",
        "parent_hash",
        "ref",
        "tally",
        "told",
        "undecided",
    )

    def __init__(self, request: StoreRequest, deadline_s: float) -> None:
        self.ref = request.job
        self.namespace = request.namespace
        self.generation = request.generation
        self.group = request.group
        self.parent_hash = request.parent_hash
        self.hashes = request.hashes
        self.deadline_s = deadline_s
        self.blocks: list[BlockEntry | Verdict | None] = [None] * len(request.hashes)
        self.undecided = len(request.hashes)
        self.tally: dict[Verdict, int] = {}
        #: Ranks that have begun the job, and those that were told its end.
        self.begun: set[int] = set()
        self.told: set[int] = set()
        #: Blocks found present, each with a hold until the job has settled for all ranks.
        self.held: list[BlockEntry] = []
        #: From this block on nothing gets a slot: a tail without its head is useless.
        self.no_slot_from: int | None = None
        #: Its instance is gone: no rank will come any more.
        self.dropped = False

    @property
    def ranks_missing(self) -> bool:
        """True while some rank has not begun the job."""
        return len(self.begun) < self.namespace.ranks_total

    def matches(self, request: StoreRequest) -> bool:
        """True if another rank describes the same blocks."""
        return (
            self.namespace is request.namespace
            and self.generation == request.generation
            and self.group == request.group
            and self.parent_hash == request.parent_hash
            and self.hashes == request.hashes
        )

    def key(self, position: int) -> BlockKey:
        """Of the block at this position."""
        return BlockKey(self.namespace.namespace, self.group, self.hashes[position])

    def parent(self, position: int) -> BlockKey | None:
        """Of the block before this position, if it is not the first of the prefix."""
        if position:
            return self.key(position - 1)
        if self.parent_hash is None:
            return None
        return BlockKey(self.namespace.namespace, self.group, self.parent_hash)

    def writing(self) -> Iterator[BlockEntry]:
        """The attempts that this job itself is writing."""
        for block in self.blocks:
            if isinstance(block, BlockEntry) and block.writer == self.ref:
                yield block


class OpenStore:
    """Copies of one rank for one job that may be running."""

    __slots__ = ("cancelled", "entries", "job", "rank", "store_id")

    def __init__(
        self, store_id: StoreId, job: JobRef, rank: int, entries: list[BlockEntry]
    ) -> None:
        self.store_id = store_id
        self.job = job
        self.rank = rank
        self.entries = entries
        #: The service was told that none of its blocks is wanted any more.
        self.cancelled = False

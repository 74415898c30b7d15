"""Stores: jobs from their first rank's begin to the last verdict, and who writes a block.

Owns the jobs, the open stores and the waiters of pending blocks. Called by Cache alone,
on the loop thread. It changes blocks only through Blocks.

A verdict on a block falls once, for all ranks of the job. A job that is decided while
ranks are missing is kept until its deadline if it holds blocks; then, as one without
holds at once, it is only remembered, in a bounded table, so that a late rank hears the
same verdicts. A rank that comes after even that is forgotten begins the job anew: it
finds the blocks, or writes into slots that the deadline takes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.entry import BlockEntry, BlockState
from kvoffd.core.jobs import Job, OpenStore, StoreRequest
from kvoffd.core.ledger import Kept, Ledgers, unstored_counts
from kvoffd.core.plans import JobSettled, StorePlan
from kvoffd.core.turn import shard_writes
from kvoffd.core.types import BlockKey, StoreId, UnstoredReason
from kvoffd.errors import BadRequest, JobConflict, StoreNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvoffd.core.blocks import Blocks
    from kvoffd.core.ledger import Verdict
    from kvoffd.core.namespaces import Namespace
    from kvoffd.core.turn import Turn
    from kvoffd.core.types import CacheOptions, InstanceKey, JobRef

    Waiters = list[tuple[Job, int]]


class Stores:
    """All jobs. Every public method that takes a turn is followed by `finish`."""

    def __init__(self, options: CacheOptions, blocks: Blocks) -> None:
        self.ledgers = Ledgers()
        self._options = options
        self._blocks = blocks
        # In the order of their first begin, which is that of their deadlines.
        self._jobs: dict[JobRef, Job] = {}
        self._remembered: dict[JobRef, Job] = {}
        self._open: dict[StoreId, OpenStore] = {}
        self._open_by_job: dict[JobRef, dict[StoreId, OpenStore]] = {}
        self._waiters: dict[BlockEntry, Waiters] = {}
        self._store_ids = 0

    @property
    def jobs_open(self) -> int:
        """Jobs that are undecided, or that hold blocks for a rank that has not come."""
        return len(self._jobs)

    def jobs(self) -> Iterator[Job]:
        """The open ones; to be read only."""
        return iter(self._jobs.values())

    def remembered(self) -> Iterator[Job]:
        """Decided ones that only wait for a late rank; to be read only."""
        return iter(self._remembered.values())

    def open_stores(self) -> Iterator[OpenStore]:
        """Copies that may be running; to be read only."""
        return iter(self._open.values())

    def waiting(self, entry: BlockEntry) -> list[tuple[Job, int]]:
        """Who waits for a pending block, and for which of its own blocks, in order."""
        waiters = self._waiters.get(entry, ())
        return [(job, position) for job, position in waiters if job.blocks[position] is entry]

    def awaited(self) -> Iterator[BlockEntry]:
        """Blocks that had waiters; to be read only."""
        return iter(self._waiters)

    def begin(
        self, turn: Turn, request: StoreRequest, refusal: UnstoredReason | None, now_s: float
    ) -> None:
        """One rank begins a job. Raises BadRequest or JobConflict and changes nothing."""
        request.namespace.require_group(request.group)
        request.namespace.require_rank(request.rank)
        job = self._jobs.get(request.job) or self._remembered.get(request.job)
        if job is not None:
            if request.rank in job.begun:
                raise JobConflict(f"Rank {request.rank} has begun job {request.job.job_id} before.")
            if not job.matches(request):
                raise JobConflict(
                    f"Rank {request.rank} begins job {request.job.job_id} with other blocks than "
                    "another rank did."
                )
            self._join(turn, job, request.rank)
            return
        if not request.hashes:
            raise BadRequest("A store job has at least one block.")
        if len(set(request.hashes)) != len(request.hashes) or request.parent_hash in request.hashes:
            raise BadRequest("A store job names one of its blocks twice.")
        if refusal is None:
            refusal = self._refusal(request)
        job = Job(request, now_s + self._options.store_deadline_s)
        self._jobs[job.ref] = job
        if refusal is not None:
            self._join(turn, job, request.rank)
            for position in range(len(job.blocks)):
                self._decide(turn, job, position, refusal)
            return
        self._place(turn, job, request.rank)

    def commit(self, turn: Turn, store_id: StoreId) -> None:
        """A rank's copies of one plan have ended well. Raises StoreNotFound."""
        store = self._close(store_id)
        # The tail first, so that the head is the most recent.
        for entry in reversed(store.entries):
            if self._blocks.commit_shard(turn, entry, store.rank):
                self._decide(turn, self._jobs[entry.writer], entry.position, Kept.STORED)
                for job, position in self.waiting(entry):
                    self._decide(turn, job, position, Kept.PRESENT, entry)
                self._waiters.pop(entry, None)

    def abort(self, turn: Turn, store_id: StoreId, reason: UnstoredReason) -> None:
        """A rank's copies of one plan have ended badly, or never began. Raises StoreNotFound."""
        store = self._close(store_id)
        for entry in store.entries:
            pending = entry.state is BlockState.PENDING
            self._blocks.abort_shard(turn, entry, store.rank)
            if pending:
                turn.aborted.append(entry)
                self._decide(turn, self._jobs[entry.writer], entry.position, reason)

    def revoke(self, turn: Turn, ref: JobRef, reason: UnstoredReason) -> None:
        """Give up what is undecided of a job; an unknown or settled one has nothing."""
        job = self._jobs.get(ref)
        if job is not None:
            self._fail(turn, job, reason)

    def reset(self, turn: Turn, namespace: Namespace) -> None:
        """Give up what is undecided of all jobs of a namespace."""
        for job in self._jobs.values():
            if job.namespace is namespace:
                self._fail(turn, job, UnstoredReason.GENERATION_MOVED)

    def drop(self, turn: Turn, instance: InstanceKey) -> None:
        """Give up and forget all jobs of an instance that is gone."""
        for job in self._jobs.values():
            if job.ref.instance == instance:
                job.dropped = True
                self._fail(turn, job, UnstoredReason.RANK_LOST)
                turn.decided[job] = None
        for ref in [ref for ref in self._remembered if ref.instance == instance]:
            del self._remembered[ref]
        self.ledgers.drop(instance)

    def expire(self, turn: Turn, now_s: float) -> None:
        """Give up what is not sealed by its deadline, and holds for ranks that never came."""
        overdue: list[Job] = []
        for job in self._jobs.values():
            if job.deadline_s >= now_s:
                break
            overdue.append(job)
        for job in overdue:
            self._fail(turn, job, UnstoredReason.DEADLINE)
            self._unhold(turn, job)
            turn.decided[job] = None

    def finish(self, turn: Turn) -> None:
        """Do what has to wait until all verdicts of the call have fallen."""
        for entry in turn.aborted:
            waiters = self.waiting(entry)
            self._waiters.pop(entry, None)
            if waiters:
                self._promote(turn, waiters)
        for job in turn.decided:
            self._settle(turn, job)
        for entry in turn.protected:
            self._blocks.unhold(turn, entry)
        for (job, rank), entries in turn.writes.items():
            turn.stores.append(self._open_store(job.ref, rank, entries))
        for ref in dict.fromkeys(entry.writer for entry in turn.aborted):
            for store in self._open_by_job.get(ref, {}).values():
                if not store.cancelled and all(
                    entry.state is BlockState.ABORTED for entry in store.entries
                ):
                    store.cancelled = True
                    turn.cancelled.append(store.store_id)

    def _refusal(self, request: StoreRequest) -> UnstoredReason | None:
        if request.generation != request.namespace.generation:
            return UnstoredReason.STALE_GENERATION
        if len(self._jobs) >= self._options.open_jobs_max:
            return UnstoredReason.OVERLOADED
        return None

    def _join(self, turn: Turn, job: Job, rank: int) -> None:
        """Count a rank in, with the verdicts there are, and let it copy what is being written."""
        job.begun.add(rank)
        self.ledgers.submit(job.ref.instance, len(job.blocks))
        for verdict, blocks in job.tally.items():
            self.ledgers.decide(job.ref.instance, verdict, blocks)
        for entry in job.writing():
            self._write(turn, job, rank, entry)
        if not job.undecided:
            turn.decided[job] = None

    def _place(self, turn: Turn, job: Job, rank: int) -> None:
        """The verdicts of the first rank. What is present is held before room is made."""
        self._join(turn, job, rank)
        index = self._blocks.index
        self._protect_parent(turn, job)
        namespace, group = job.namespace.namespace, job.group
        keys = [BlockKey(namespace, group, block_hash) for block_hash in job.hashes]
        absent: list[int] = []
        for position, key in enumerate(keys):
            entry = index.get(key)
            if entry is None:
                absent.append(position)
            elif entry.state is BlockState.READY:
                self._decide(turn, job, position, Kept.PRESENT, entry)
            else:
                job.blocks[position] = entry
                self._waiters.setdefault(entry, []).append((job, position))
        self._blocks.touch(reversed(job.held))
        parent = job.parent(0)
        for position in absent:
            before = keys[position - 1] if position else parent
            if job.no_slot_from is None:
                entry = self._blocks.insert(
                    turn, keys[position], before, job.namespace, job.ref, position
                )
                if entry is not None:
                    job.blocks[position] = entry
                    self._write(turn, job, rank, entry)
                    continue
                job.no_slot_from = position
            self._decide(turn, job, position, UnstoredReason.NO_SLOT)

    def _promote(self, turn: Turn, waiters: Waiters) -> None:
        """The first waiter that finds room becomes the writer; the others wait for it."""
        for turn_of, (job, position) in enumerate(waiters):
            self._protect(turn, job)
            entry = None
            if job.no_slot_from is None or position < job.no_slot_from:
                entry = self._blocks.insert(
                    turn,
                    job.key(position),
                    job.parent(position),
                    job.namespace,
                    job.ref,
                    position,
                )
            if entry is None:
                if job.no_slot_from is None:
                    job.no_slot_from = position
                self._decide(turn, job, position, UnstoredReason.NO_SLOT)
                continue
            job.blocks[position] = entry
            for rank in sorted(job.begun):
                self._write(turn, job, rank, entry)
            rest = waiters[turn_of + 1 :]
            for other, place in rest:
                other.blocks[place] = entry
            if rest:
                self._waiters[entry] = rest
            return

    def _write(self, turn: Turn, job: Job, rank: int, entry: BlockEntry) -> None:
        self._blocks.open_shard(entry, rank)
        turn.writes.setdefault((job, rank), []).append(entry)

    def _protect_parent(self, turn: Turn, job: Job) -> None:
        parent = job.parent(0)
        entry = None if parent is None else self._blocks.index.get(parent)
        if entry is not None and entry.state is BlockState.READY:
            self._blocks.hold(entry)
            turn.protected.append(entry)

    def _protect(self, turn: Turn, job: Job) -> None:
        """Hold all of a job's blocks until the call ends, so that it evicts none of them."""
        if job in turn.protected_jobs:
            return
        turn.protected_jobs.add(job)
        self._protect_parent(turn, job)
        for position in range(len(job.hashes)):
            entry = self._blocks.index.get(job.key(position))
            if entry is not None and entry.state is BlockState.READY:
                self._blocks.hold(entry)
                turn.protected.append(entry)

    def _decide(
        self,
        turn: Turn,
        job: Job,
        position: int,
        verdict: Verdict,
        present: BlockEntry | None = None,
    ) -> None:
        if present is not None:
            self._blocks.hold(present)
            job.held.append(present)
        job.blocks[position] = verdict
        job.undecided -= 1
        job.tally[verdict] = job.tally.get(verdict, 0) + 1
        self.ledgers.decide(job.ref.instance, verdict, len(job.begun))
        if not job.undecided:
            turn.decided[job] = None

    def _fail(self, turn: Turn, job: Job, reason: UnstoredReason) -> None:
        if not job.undecided:
            return
        for position, block in enumerate(job.blocks):
            if isinstance(block, BlockEntry):
                if block.writer == job.ref:
                    self._blocks.abort(turn, block)
                    turn.aborted.append(block)
                self._decide(turn, job, position, reason)

    def _settle(self, turn: Turn, job: Job) -> None:
        """Tell the ranks, and let the record go as soon as nobody needs it."""
        for rank in sorted(job.begun - job.told):
            job.told.add(rank)
            turn.settled.append(
                JobSettled(
                    job=job.ref,
                    rank=rank,
                    stored=job.tally.get(Kept.STORED, 0),
                    present=job.tally.get(Kept.PRESENT, 0),
                    unstored=unstored_counts(job.tally),
                )
            )
        over = job.dropped or not job.ranks_missing
        if over:
            self._unhold(turn, job)
        elif job.held:
            return
        self._jobs.pop(job.ref, None)
        if over:
            self._remembered.pop(job.ref, None)
        elif job.ref not in self._remembered:
            self._remembered[job.ref] = job
            if len(self._remembered) > self._options.open_jobs_max:
                del self._remembered[next(iter(self._remembered))]

    def _unhold(self, turn: Turn, job: Job) -> None:
        for entry in job.held:
            self._blocks.unhold(turn, entry)
        job.held.clear()

    def _open_store(self, ref: JobRef, rank: int, entries: list[BlockEntry]) -> StorePlan:
        self._store_ids += 1
        entries.sort(key=lambda entry: entry.position)
        store = OpenStore(StoreId(self._store_ids), ref, rank, entries)
        self._open[store.store_id] = store
        self._open_by_job.setdefault(ref, {})[store.store_id] = store
        return StorePlan(store.store_id, ref, rank, shard_writes(entries, rank))

    def _close(self, store_id: StoreId) -> OpenStore:
        store = self._open.pop(store_id, None)
        if store is None:
            raise StoreNotFound(f"Store {store_id} has ended, or never began.")
        siblings = self._open_by_job[store.job]
        del siblings[store_id]
        if not siblings:
            del self._open_by_job[store.job]
        return store

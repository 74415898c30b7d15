"""Stores: carries the core's plans out, from a rank's job to its outcome.

Owns the table of copies into slots that a copier has not ended. Runs on the loop thread.
All effects of the core pass through `apply`, whoever called the core: slot records are
written in the order that plans.py demands, before any copy is started. A slot is given
back to the core only when its copy has really ended.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvoffd.copier.frames import Outcome, pack_block_ids, pack_slots
from kvoffd.core.types import JobRef, UnstoredReason
from kvoffd.errors import JobConflict
from kvoffd.service.copiers import Copies
from kvoffd.service.seats import RankJob
from kvoffd.service.streams import StoreOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd.arena.arena import Arena
    from kvoffd.copier.frames import BatchEnd
    from kvoffd.copier.supervisor import Copier
    from kvoffd.core.cache import Cache
    from kvoffd.core.plans import Effects, JobSettled, StorePlan
    from kvoffd.core.types import InstanceKey, NamespaceId, StoreId
    from kvoffd.service.copiers import Copiers
    from kvoffd.service.instances import Instance
    from kvoffd.service.seats import Seat, StoreRequest
    from kvoffd.service.streams import RankStream

_REASONS = {
    Outcome.REVOKED: UnstoredReason.REVOKED,
    Outcome.CANCELLED: UnstoredReason.REVOKED,
    Outcome.DEADLINE: UnstoredReason.DEADLINE,
    Outcome.FAILED: UnstoredReason.COPIER,
}


class StoreService:
    """All stores of all instances."""

    def __init__(
        self,
        cache: Cache,
        arena: Arena,
        copiers: Copiers,
        find_instance: Callable[[InstanceKey], Instance | None],
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._copiers = copiers
        self._find_instance = find_instance
        self._clock = clock
        self._open: dict[StoreId, tuple[Copier, int]] = {}

    @property
    def copies_open(self) -> int:
        """Plans whose copies have not ended."""
        return len(self._open)

    def begin(
        self,
        seat: Seat,
        stream: RankStream,
        namespace: NamespaceId,
        request: StoreRequest,
        refusal: UnstoredReason | None,
    ) -> None:
        """One rank begins a job; its one outcome comes on the stream.

        Raises:
            BadRequest: no such group, or one block twice.
            JobConflict: this rank has begun the job, or another one with other blocks.
        """
        job_id = request.job_id
        if job_id in seat.jobs:
            raise JobConflict(f"Job {job_id} is in flight.")
        instance = seat.instance
        ref = JobRef(instance.key, job_id)
        unsettled_before = job_id in instance.unsettled
        seat.jobs[job_id] = RankJob(
            ref, seat, stream, request.ticket_cell, request.bell, request.group, request.block_ids
        )
        instance.unsettled.add(job_id)
        try:
            effects = self._cache.begin_store(
                ref,
                seat.rank,
                namespace,
                request.generation,
                request.group,
                request.parent_hash or None,
                request.hashes,
                self._clock(),
                refusal,
            )
        except Exception:
            del seat.jobs[job_id]
            if not unsettled_before:
                instance.unsettled.discard(job_id)
            raise
        stream.jobs_in_flight += 1
        self.apply(effects)
        if job_id in instance.revoked:
            self.revoke(ref, UnstoredReason.REVOKED)

    def revoke(self, ref: JobRef, reason: UnstoredReason) -> None:
        """Nothing unsealed of the job will ever be found; unknown jobs are ignored."""
        self.apply(self._cache.revoke_job(ref, reason, self._clock()))

    def stream_lost(self, seat: Seat, stream: RankStream) -> None:
        """The client has failed the jobs that it sent by a stream which is gone."""
        lost = [job for job in seat.jobs.values() if job.stream is stream]
        seat.lost_jobs = frozenset(job.ref.job_id for job in lost)
        for job in lost:
            job.lost = True
            # Where this rank has copied all of its own, the others may still seal.
            if job.copies_open:
                self.revoke(job.ref, UnstoredReason.REVOKED)

    def rank_lost(self, seat: Seat) -> None:
        """What still needs this rank's shards can never be sealed."""
        instance = seat.instance
        for job_id in tuple(instance.unsettled):
            job = seat.jobs.get(job_id)
            # As above.
            if job is None or job.copies_open:
                self.revoke(JobRef(instance.key, job_id), UnstoredReason.RANK_LOST)

    def instance_ended(self, instance: Instance) -> None:
        """Leases and jobs of an instance go with its last session."""
        self.apply(self._cache.drop_instance(instance.key, self._clock()))

    def apply(self, effects: Effects) -> None:
        """Do all that follows from one call into the core."""
        todo = [effects]
        while todo:
            todo.extend(self._apply(todo.pop(0)))

    def _apply(self, effects: Effects) -> list[Effects]:
        """Answers what follows from plans that nobody can carry out."""
        arena = self._arena
        if effects.freed:
            arena.mark_free(effects.freed)
        for extent, slot_bytes in effects.extents:
            arena.write_extent(extent, slot_bytes)
        if effects.ready:
            arena.mark_ready(effects.ready)
        if effects.stores:
            arena.write_records_writing(
                [write.record for plan in effects.stores for write in plan.writes]
            )
        more = [
            self._cache.abort_store(plan.store_id, UnstoredReason.RANK_LOST, self._clock())
            for plan in effects.stores
            if not self._start(plan)
        ]
        for store_id in effects.cancelled:
            started = self._open.get(store_id)
            if started is not None:
                copier, batch_id = started
                copier.cancel(batch_id)
        for settled in effects.settled:
            self._settle(settled)
        return more

    def _start(self, plan: StorePlan) -> bool:
        """False when the rank is gone or has given the job up: nothing to copy from."""
        instance = self._find_instance(plan.job.instance)
        seat = instance.seats.get(plan.rank) if instance is not None else None
        job = seat.jobs.get(plan.job.job_id) if seat is not None else None
        if seat is None or job is None or job.lost or seat.lost or seat.pool_id is None:
            return False
        offset_bytes = self._cache.slot_offset_bytes
        block_ids = job.block_ids
        copies = Copies(
            pool_id=seat.pool_id,
            group=job.group,
            job_id=plan.job.job_id,
            ticket_cell=job.ticket_cell,
            bell=job.bell,
            slots=pack_slots([offset_bytes(write.record.slot) for write in plan.writes]),
            block_ids=pack_block_ids([block_ids[write.block] for write in plan.writes]),
        )
        job.copies_open += 1
        ended = partial(self._copies_ended, plan.store_id, job)
        self._open[plan.store_id] = (seat.copier, self._copiers.store(seat.copier, copies, ended))
        return True

    def _copies_ended(self, store_id: StoreId, job: RankJob, end: BatchEnd) -> None:
        del self._open[store_id]
        job.copies_open -= 1
        if end.outcome is Outcome.COPIED:
            self.apply(self._cache.commit_store(store_id, self._clock()))
            return
        reason = UnstoredReason.RANK_LOST if job.seat.lost else _REASONS[end.outcome]
        self.apply(self._cache.abort_store(store_id, reason, self._clock()))

    def _settle(self, settled: JobSettled) -> None:
        instance = self._find_instance(settled.job.instance)
        if instance is None:
            return
        job_id = settled.job.job_id
        instance.unsettled.discard(job_id)
        seat = instance.seats.get(settled.rank)
        job = seat.jobs.pop(job_id, None) if seat is not None else None
        if job is not None:
            job.stream.post_store(
                StoreOutcome(job_id, settled.stored, settled.present, settled.unstored)
            )

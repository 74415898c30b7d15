"""Loads: from a rank's job over a lease to the outcome that says whether bytes arrived.

Owns the loads that have no outcome yet. Runs on the loop thread. A load is handed to a
copier only when its client has confirmed that very process, because only then can the
client prove by itself that the process is gone. Until then it waits, within its deadline.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import structlog

from kvoffd.copier.frames import Outcome, monotonic_ms, pack_block_ids, pack_slots
from kvoffd.core.types import LeaseId
from kvoffd.errors import JobConflict, LeaseNotFound, StaleGeneration
from kvoffd.service.copiers import Copies
from kvoffd.service.seats import OpenLoad
from kvoffd.service.streams import LoadOutcome, LoadStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd.copier.frames import BatchEnd
    from kvoffd.core.cache import Cache
    from kvoffd.core.plans import Effects, LoadPlan
    from kvoffd.service.copiers import Copiers
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.seats import LoadRequest, Seat
    from kvoffd.service.sessions import Session
    from kvoffd.service.streams import RankStream

log = structlog.get_logger(__name__)

_STATUSES = {
    Outcome.REVOKED: LoadStatus.REVOKED,
    Outcome.CANCELLED: LoadStatus.REVOKED,
    Outcome.DEADLINE: LoadStatus.DEADLINE,
    Outcome.FAILED: LoadStatus.COPIER,
}


class LoadService:
    """All loads of all instances."""

    def __init__(
        self,
        cache: Cache,
        copiers: Copiers,
        apply: Callable[[Effects], None],
        options: ServiceOptions,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._copiers = copiers
        self._apply = apply
        self._options = options
        self._clock = clock
        self._open: set[OpenLoad] = set()

    @property
    def loads_open(self) -> int:
        """Loads without an outcome."""
        return len(self._open)

    def begin(
        self,
        seat: Seat,
        stream: RankStream,
        request: LoadRequest,
        refusal: LoadStatus | None,
    ) -> None:
        """One rank loads from a lease; its one outcome comes on the stream.

        Raises:
            BadRequest: the lease has not so many blocks.
            JobConflict: the job is in flight.
        """
        job_id = request.job_id
        if job_id in seat.loads:
            raise JobConflict(f"Load job {job_id} is in flight.")
        plan = refusal or self._plan(seat, request)
        stream.jobs_in_flight += 1
        if isinstance(plan, LoadStatus):
            stream.post_load(LoadOutcome(job_id, plan))
            return
        offset_bytes = self._cache.slot_offset_bytes
        load = OpenLoad(
            job_id=job_id,
            load_id=plan.load_id,
            seat=seat,
            stream=stream,
            group=plan.group,
            ticket_cell=request.ticket_cell,
            bell=request.bell,
            slots=pack_slots([offset_bytes(slot) for slot in plan.slots]),
            block_ids=pack_block_ids(request.block_ids),
            deadline_s=self._clock() + min(request.deadline_s, self._options.load_deadline_max_s),
        )
        seat.loads[job_id] = load
        self._open.add(load)
        self._submit(load)

    def copier_seen(self, session: Session, incarnation: int) -> None:
        """A client holds the proof of death of this copier: its loads may start."""
        session.copier_seen = incarnation
        if session.seat is not None:
            for load in tuple(session.seat.loads.values()):
                if load.batch_id is None:
                    self._submit(load)

    def cancel(self, seat: Seat, job_id: int) -> bool:
        """Stop a load that has not started; False when there is no such load."""
        load = seat.loads.get(job_id)
        if load is None:
            return False
        self._stop(load, LoadStatus.REVOKED)
        return True

    def stream_lost(self, seat: Seat, stream: RankStream) -> None:
        """The client ends the loads of a lost stream by its tickets; stop what has not begun."""
        for load in tuple(seat.loads.values()):
            if load.stream is stream:
                self._stop(load, LoadStatus.REVOKED)

    def rank_lost(self, seat: Seat) -> None:
        """What has not started never will; what runs ends with the pool."""
        for load in tuple(seat.loads.values()):
            self._stop(load, LoadStatus.REVOKED)

    def expire(self, now_s: float) -> None:
        """Fail what waited past its deadline; kill copiers that sit on overdue loads."""
        for load in tuple(self._open):
            if now_s <= load.deadline_s:
                continue
            if load.batch_id is None:
                self._end(load, LoadStatus.DEADLINE)
            elif now_s > load.deadline_s + self._options.overdue_kill_s and not load.copier_killed:
                load.copier_killed = True
                log.error("load overdue, copier killed", job=load.job_id)
                load.seat.copier.kill(f"Load job {load.job_id} is overdue.")

    def _plan(self, seat: Seat, request: LoadRequest) -> LoadPlan | LoadStatus:
        try:
            return self._cache.begin_load(
                seat.instance.key,
                LeaseId(request.lease_id),
                seat.rank,
                request.skip_blocks,
                len(request.block_ids),
                request.generation,
                self._clock(),
            )
        except StaleGeneration:
            return LoadStatus.STALE_GENERATION
        except (LeaseNotFound, JobConflict):
            # A lease that this rank has used up is no lease for it any more.
            return LoadStatus.LEASE_NOT_FOUND

    def _submit(self, load: OpenLoad) -> None:
        seat = load.seat
        copier = seat.copier
        if seat.pool_id is None or copier.state != "up":
            return
        if seat.session.copier_seen != copier.incarnation:
            return
        left_ms = math.ceil((load.deadline_s - self._clock()) * 1000)
        copies = Copies(
            pool_id=seat.pool_id,
            group=load.group,
            job_id=load.job_id,
            ticket_cell=load.ticket_cell,
            bell=load.bell,
            slots=load.slots,
            block_ids=load.block_ids,
        )
        load.batch_id = self._copiers.load(
            copier, copies, monotonic_ms() + left_ms, partial(self._copies_ended, load)
        )

    def _stop(self, load: OpenLoad, status: LoadStatus) -> None:
        if load.batch_id is None:
            self._end(load, status)
        else:
            load.seat.copier.cancel(load.batch_id)

    def _copies_ended(self, load: OpenLoad, end: BatchEnd) -> None:
        copied = end.outcome is Outcome.COPIED
        self._end(load, LoadStatus.LOADED if copied else _STATUSES[end.outcome])

    def _end(self, load: OpenLoad, status: LoadStatus) -> None:
        self._open.discard(load)
        load.seat.loads.pop(load.job_id, None)
        loaded = status is LoadStatus.LOADED
        good, effects = self._cache.end_load(load.load_id, loaded, self._clock())
        if loaded and not good:
            status = LoadStatus.STALE_GENERATION
        load.stream.post_load(LoadOutcome(load.job_id, status))
        self._apply(effects)

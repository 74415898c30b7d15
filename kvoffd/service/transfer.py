"""Transfer: one rank's stream, from its opening to its loss, and the steps it brings.

Owns the epochs. Runs on the loop thread. What belongs to a stream ends with it: the
client fails those jobs by itself, so they are revoked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvoffd.core.types import UnstoredReason
from kvoffd.errors import ProtocolMismatch
from kvoffd.service.streams import LoadStatus, RankStream, StoreOutcome

if TYPE_CHECKING:
    from kvoffd.service.fence import FenceService
    from kvoffd.service.load import LoadService
    from kvoffd.service.namespaces import Namespaces
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.seats import LoadRequest, Seat, StoreRequest
    from kvoffd.service.store import StoreService


#: Outcomes that wait for their client, in units of jobs_in_flight_max; refused jobs have one, too.
OUTCOMES_WAITING_FACTOR = 4


class Step(NamedTuple):
    """One message of a rank."""

    stores: list[StoreRequest]
    loads: list[LoadRequest]
    revoked_job_ids: list[int]


class TransferService:
    """The streams of all ranks."""

    def __init__(
        self,
        stores: StoreService,
        loads: LoadService,
        fences: FenceService,
        namespaces: Namespaces,
        options: ServiceOptions,
    ) -> None:
        self._stores = stores
        self._loads = loads
        self._fences = fences
        self._namespaces = namespaces
        self._options = options
        self.draining = False

    def open_stream(self, seat: Seat, epoch: int) -> RankStream:
        """Begin a new epoch; it replaces the former stream, if there still is one.

        Raises:
            ProtocolMismatch: the epoch is not above all former ones.
        """
        if seat.epoch is not None and epoch <= seat.epoch:
            raise ProtocolMismatch(
                f"Epoch {epoch} is not above epoch {seat.epoch}, which this session has had."
            )
        if seat.stream is not None:
            former = seat.stream
            self.lose_stream(seat, former, f"Epoch {epoch} replaces epoch {former.epoch}.")
        seat.epoch = epoch
        seat.stream = RankStream(epoch)
        return seat.stream

    def lose_stream(self, seat: Seat, stream: RankStream, reason: str) -> None:
        """The stream is gone or has ended; a second call is ignored."""
        stream.close(reason)
        if seat.stream is not stream:
            return
        seat.stream = None
        self._loads.stream_lost(seat, stream)
        self._stores.stream_lost(seat, stream)

    def step(self, seat: Seat, stream: RankStream, step: Step) -> None:
        """Take one message in: loads first, they are waited for.

        Raises:
            BadRequest, JobConflict, ProtocolMismatch: the client broke the protocol; what
                was taken in before stays so.
        """
        if stream.goodbye or stream is not seat.stream:
            raise ProtocolMismatch("A step came after the stream's goodbye.")
        if stream.outcomes_waiting > OUTCOMES_WAITING_FACTOR * self._options.jobs_in_flight_max:
            raise ProtocolMismatch("The client hands over steps, but does not read the outcomes.")
        for load in step.loads:
            self._loads.begin(seat, stream, load, self._load_refusal(seat))
        if step.stores:
            namespace = self._namespaces.require(seat.instance.digest)
            for store in step.stores:
                if store.job_id in seat.lost_jobs:
                    # Sent again after its stream was lost: it was revoked with that stream.
                    unstored = ((UnstoredReason.REVOKED, len(store.hashes)),)
                    stream.jobs_in_flight += 1
                    stream.post_store(StoreOutcome(store.job_id, 0, 0, unstored))
                else:
                    self._stores.begin(seat, stream, namespace, store, self._store_refusal(seat))
        if step.revoked_job_ids:
            self._fences.revoke(seat, step.revoked_job_ids)

    def _store_refusal(self, seat: Seat) -> UnstoredReason | None:
        if self.draining:
            return UnstoredReason.DRAINING
        if not seat.instance.is_complete:
            return UnstoredReason.NOT_COMPLETE
        if seat.jobs_in_flight >= self._options.jobs_in_flight_max:
            return UnstoredReason.OVERLOADED
        return None

    def _load_refusal(self, seat: Seat) -> LoadStatus | None:
        if self.draining:
            return LoadStatus.DRAINING
        if seat.jobs_in_flight >= self._options.jobs_in_flight_max:
            return LoadStatus.OVERLOADED
        return None

"""A rank's session: jobs out, completions in, on one stream.

The engine's thread and the background loop meet in two deques and one flag:
the engine appends steps and takes results, the loop does the opposite. What
belongs to the loop alone is marked so. One task writes to the stream and one
reads from it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvoffd_client.errors import SessionClosed
from kvoffd_client.handshake import OfferedMemory
from kvoffd_client.lease_ids import lease_number
from kvoffd_client.messages import (
    job_blocks,
    load_result,
    rank_registration,
    session_store_result,
    step_message,
    store_result,
)
from kvoffd_client.ports import (
    LOADS_PART,
    NO_COMPLETIONS,
    Completions,
    LoadResult,
    LoadWork,
    Reason,
    Step,
    StoreResult,
    StoreWork,
)
from kvoffd_client.session import Connection, Session
from kvoffd_proto.v1 import handshake_pb2, offload_pb2

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvoffd_client.copiers import CopierBook
    from kvoffd_client.descriptions import EngineIdentity, RankDescription, SessionOptions
    from kvoffd_client.tickets import TicketPage

# Steps that wait while the daemon is slow go out together, up to about so many
# blocks: some 400 KiB, a tenth of what one message may hold.
_MESSAGE_BLOCKS_MAX = 8192


@dataclass(frozen=True, slots=True)
class RankCounts:
    """What the session decided or met by itself, for metrics."""

    jobs_not_connected: int
    jobs_overloaded: int
    jobs_over_limit: int
    jobs_connection_lost: int
    outcomes_unexpected: int
    outcomes_malformed: int


class RankSession(Session):
    """Implements `RankPort`, see there for what its methods promise."""

    _role = handshake_pb2.SESSION_ROLE_RANK

    def __init__(
        self,
        options: SessionOptions,
        engine: EngineIdentity,
        rank: RankDescription,
        tickets: TicketPage,
    ) -> None:
        super().__init__(options, engine)
        self._rank = rank
        self._tickets_fd = tickets.memory.fd
        self._tickets_bytes = tickets.memory.size_bytes
        self._ticket_cells = tickets.cells
        self._epochs = itertools.count(1)
        # Both threads.
        self._outbox: deque[tuple[int, Step]] = deque()
        self._results: deque[StoreResult | LoadResult] = deque()
        self._woken = False
        self._epoch: int | None = None  # written by the loop; None: nothing is taken
        self._cell_copiers: list[CopierBook | None] = [None] * tickets.cells
        # The engine's thread.
        self._in_flight_jobs = 0
        self._answered_here = dict.fromkeys(Reason, 0)
        # The loop.
        self._stores: dict[int, int] = {}  # job id -> blocks, sent and not answered
        self._loads: set[int] = set()
        self._to_send: deque[Step] = deque()
        self._connection: Connection | None = None
        self._wake_writer = asyncio.Event()
        self._all_answered = asyncio.Event()
        self._is_leaving = False
        self._stream_ended = asyncio.Event()
        self._closing_reason: str | None = None
        self._stream: Any = None
        self._opened_epoch = 0
        self._outcomes_unexpected = 0
        self._outcomes_malformed = 0

    # --- the engine's thread ---------------------------------------------------------

    def hand_over(self, step: Step) -> None:
        jobs = len(step.stores) + len(step.loads)
        limits = self._limits
        epoch = self._epoch
        if epoch is None or limits is None or self._is_inherited():
            self._in_flight_jobs += jobs
            self._answer(step, Reason.NOT_CONNECTED)
            return
        room = limits.jobs_in_flight_max - self._in_flight_jobs
        stores_room = room - limits.jobs_in_flight_max // LOADS_PART
        self._in_flight_jobs += jobs
        if jobs > stores_room:
            step, refused = _cut(step, max(room, 0), max(stores_room, 0))
            self._answer(refused, Reason.OVERLOADED)
        if not (step.stores or step.loads or step.revoked_job_ids):
            return
        self._outbox.append((epoch, step))
        # The loop clears the flag before it empties the outbox, so no step is left behind.
        if not self._woken and self._io is not None:
            self._woken = True
            if not self._io.submit(self._take_outbox):
                self._answer_outbox()

    def drain(self) -> Completions:
        results = self._results
        if not results:
            return NO_COMPLETIONS
        stores: list[StoreResult] = []
        loads: list[LoadResult] = []
        # As many as there are now: more may come all the time.
        for _ in range(len(results)):
            result = results.popleft()
            if isinstance(result, StoreResult):
                stores.append(result)
                if not result.from_daemon and result.failed:
                    self._answered_here[Reason(result.failed[0].reason)] += 1
            else:
                loads.append(result)
                if not result.from_daemon and result.reason is not None:
                    self._answered_here[result.reason] += 1
        self._in_flight_jobs -= len(stores) + len(loads)
        return Completions(tuple(stores), tuple(loads))

    def copier_gone(self, ticket_cell: int, incarnation: int) -> bool:
        copiers = self._cell_copiers[ticket_cell]
        return copiers is not None and copiers.is_gone(incarnation)

    @property
    def counts(self) -> RankCounts:
        """Of the results that were drained, those of the session's own, and odd outcomes."""
        by_reason = self._answered_here
        return RankCounts(
            jobs_not_connected=by_reason[Reason.NOT_CONNECTED],
            jobs_overloaded=by_reason[Reason.OVERLOADED],
            jobs_over_limit=by_reason[Reason.OVER_LIMIT],
            jobs_connection_lost=by_reason[Reason.CONNECTION_LOST],
            outcomes_unexpected=self._outcomes_unexpected,
            outcomes_malformed=self._outcomes_malformed,
        )

    # --- either thread: results are appended, whoever finds that a job has ended ------

    def _answer(self, step: Step, reason: Reason) -> None:
        for store in step.stores:
            self._answer_store(store.job_id, len(store.block_ids), reason)
        for load in step.loads:
            self._answer_load(load.job_id, reason)

    def _answer_store(self, job_id: int, blocks: int, reason: Reason) -> None:
        self._results.append(session_store_result(job_id, blocks, reason))

    def _answer_load(self, job_id: int, reason: Reason) -> None:
        self._results.append(LoadResult(job_id, reason, from_daemon=False))

    def _answer_outbox(self) -> None:
        while self._outbox:
            self._answer(self._outbox.popleft()[1], Reason.NOT_CONNECTED)

    # --- the loop: from the outbox to the stream --------------------------------------

    def _take_outbox(self) -> None:
        """Move what the engine handed over to the writer; what came too late is answered."""
        self._woken = False
        while self._outbox:
            epoch, step = self._outbox.popleft()
            if epoch != self._epoch or self._connection is None:
                self._answer(step, Reason.NOT_CONNECTED)
                continue
            step = self._admitted(step, self._connection)
            if step.stores or step.loads or step.revoked_job_ids:
                self._to_send.append(step)
        if self._to_send:
            self._wake_writer.set()

    def _admitted(self, step: Step, connection: Connection) -> Step:
        """The jobs that this daemon may be sent, entered as open; the others are answered."""
        stores = tuple(store for store in step.stores if self._admit_store(store, connection))
        loads = tuple(load for load in step.loads if self._admit_load(load, connection))
        if self._stores:
            self._all_answered.clear()
        return Step(stores, loads, step.revoked_job_ids)

    def _admit_store(self, store: StoreWork, connection: Connection) -> bool:
        blocks = len(store.block_ids)
        if not 0 < blocks <= connection.facts.limits.store_blocks_max:
            self._answer_store(store.job_id, blocks, Reason.OVER_LIMIT)
            return False
        if len(store.block_hashes) != blocks:
            self._answer_store(store.job_id, blocks, Reason.PROTOCOL)
            return False
        self._stores[store.job_id] = blocks
        return True

    def _admit_load(self, load: LoadWork, connection: Connection) -> bool:
        if lease_number(connection.facts.boot_id, load.lease_id) is None:
            # Another daemon's lease: here its number may stand for other blocks.
            self._answer_load(load.job_id, Reason.LEASE_NOT_FOUND)
            return False
        is_sized = 0 < len(load.block_ids) <= connection.facts.limits.load_blocks_max
        if not is_sized or not 0 <= load.ticket_cell < len(self._cell_copiers):
            self._answer_load(load.job_id, Reason.OVER_LIMIT)
            return False
        if load.deadline_s <= self._options.clock():
            self._answer_load(load.job_id, Reason.DEADLINE)
            return False
        self._loads.add(load.job_id)
        self._cell_copiers[load.ticket_cell] = connection.handshake.copiers
        return True

    async def _write(self, connection: Connection) -> None:
        """Write what there is, one message at a time; the goodbye is the last."""
        boot_id = connection.facts.boot_id
        while True:
            await self._wake_writer.wait()
            self._wake_writer.clear()
            while self._to_send:
                steps = self._next_steps()
                await self._write_one(step_message(steps, boot_id, self._options.clock()))
            if self._is_leaving:
                goodbye = offload_pb2.StreamGoodbye(reason="closed by the engine")
                await self._write_one(offload_pb2.RankMessage(goodbye=goodbye))
                await self._stream.done_writing()
                self._is_leaving = False

    def _next_steps(self) -> list[Step]:
        steps = [self._to_send.popleft()]
        blocks = job_blocks(steps[0])
        while self._to_send and blocks + job_blocks(self._to_send[0]) <= _MESSAGE_BLOCKS_MAX:
            blocks += job_blocks(self._to_send[0])
            steps.append(self._to_send.popleft())
        return steps

    async def _write_one(self, message: offload_pb2.RankMessage) -> None:
        try:
            async with asyncio.timeout(self._options.write_timeout_s):
                await self._stream.write(message)
        except TimeoutError:
            raise SessionClosed("the daemon does not read its stream") from None
        except asyncio.InvalidStateError:
            raise SessionClosed("the stream has ended") from None

    # --- the loop: from the stream to the results -------------------------------------

    async def _read(self, connection: Connection) -> None:
        del connection
        while True:
            reply = await self._stream.read()
            if reply is grpc.aio.EOF:
                self._stream_ended.set()
                raise SessionClosed(self._closing_reason or "the daemon ended the stream")
            match reply.WhichOneof("message"):
                case "completions":
                    self._take_completions(reply.completions)
                case "closing":
                    # What runs is still answered; the end of the stream follows.
                    self._epoch = None
                    self._closing_reason = f"the daemon closes: {reply.closing.reason}"
                case _:
                    pass  # of a later protocol

    def _take_completions(self, completions: offload_pb2.Completions) -> None:
        for store in completions.stores:
            blocks = self._stores.pop(store.job_id, None)
            if blocks is None:
                self._outcomes_unexpected += 1
                continue
            result = store_result(store, blocks)
            if result is None:
                self._outcomes_malformed += 1
                self._answer_store(store.job_id, blocks, Reason.PROTOCOL)
            else:
                self._results.append(result)
        for load in completions.loads:
            if load.job_id not in self._loads:
                self._outcomes_unexpected += 1
                continue
            self._loads.remove(load.job_id)
            self._results.append(load_result(load))
        if not self._stores:
            self._all_answered.set()

    # --- the loop: the session's life ------------------------------------------------

    def _memories(self) -> Sequence[OfferedMemory]:
        pool = [
            OfferedMemory(handshake_pb2.MEMORY_KIND_POOL, memory.fd, memory.size_bytes)
            for memory in self._rank.memories
        ]
        tickets = OfferedMemory(
            handshake_pb2.MEMORY_KIND_TICKETS, self._tickets_fd, self._tickets_bytes
        )
        return [*pool, tickets]

    def _register_request(self) -> offload_pb2.RegisterRequest:
        request = super()._register_request()
        request.rank.CopyFrom(rank_registration(self._rank, self._ticket_cells))
        return request

    async def _open(self, connection: Connection) -> None:
        self._stream = connection.stub.Transfer(metadata=connection.metadata)
        epoch = next(self._epochs)
        message = offload_pb2.RankMessage(open=offload_pb2.StreamOpen(epoch=epoch))
        await self._stream.write(message)
        reply = await self._stream.read()
        if reply is grpc.aio.EOF:
            raise SessionClosed("the daemon ended the stream before it began")
        if reply.WhichOneof("message") != "opened":
            raise SessionClosed("the daemon did not begin its stream with an opening")
        if reply.opened.boot_id != connection.facts.boot_id:
            raise SessionClosed("another daemon answers at the socket")
        self._opened_epoch = epoch

    def _works(self, connection: Connection) -> list[Coroutine[Any, Any, None]]:
        return [self._write(connection), self._read(connection)]

    def _went_up(self, connection: Connection) -> None:
        self._connection = connection
        self._is_leaving = False
        self._stream_ended.clear()
        self._closing_reason = None
        self._wake_writer.clear()
        self._all_answered.set()
        self._epoch = self._opened_epoch

    def _went_down(self) -> None:
        self._epoch = None
        self._connection = None
        self._take_outbox()
        self._to_send.clear()
        stores, self._stores = self._stores, {}
        loads, self._loads = self._loads, set()
        for job_id, blocks in stores.items():
            self._answer_store(job_id, blocks, Reason.CONNECTION_LOST)
        for job_id in loads:
            self._answer_load(job_id, Reason.CONNECTION_LOST)
        self._all_answered.set()
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def _settle(self) -> None:
        self._take_outbox()
        self._epoch = None
        # Stores that the daemon has not ended would be lost with the session.
        await self._all_answered.wait()

    async def _leave(self) -> None:
        self._is_leaving = True
        self._wake_writer.set()
        # A stream that is cancelled takes what the daemon has not read with it.
        await self._stream_ended.wait()


def _cut(step: Step, room: int, stores_room: int) -> tuple[Step, Step]:
    """The part of a step that fits, loads first, and the rest."""
    loads = step.loads[:room]
    stores = step.stores[: max(stores_room - len(loads), 0)]
    rest = Step(step.stores[len(stores) :], step.loads[len(loads) :])
    return Step(stores, loads, step.revoked_job_ids), rest

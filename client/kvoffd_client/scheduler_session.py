"""A scheduler's session: lookups and leases on one stream, and resets.

The scheduler's thread appends requests to one deque and polls results that the
background loop writes, each once. What belongs to the loop alone is marked so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvoffd_client.asks import (
    LookupAbandoned,
    LookupAsked,
    ReleaseAsked,
    RenewAsked,
    Request,
    ResetAsked,
    Unanswered,
)
from kvoffd_client.errors import SessionClosed
from kvoffd_client.lease_ids import lease_id_of, lease_number
from kvoffd_client.ports import (
    LookupResult,
    PendingLookup,
    PendingRenewal,
    Reason,
    RenewFailed,
    SessionState,
)
from kvoffd_client.resets import ResetDebt
from kvoffd_client.session import Connection, Session
from kvoffd_proto.v1 import handshake_pb2, offload_pb2

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvoffd_client.descriptions import EngineIdentity, SessionOptions

# One a waiting request; more would only wait for each other.
LOOKUPS_PENDING_MAX = 4096
# gRPC's NOT_FOUND, as it comes in a CallError.
_NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]


class SchedulerSession(Session):
    """Implements `SchedulerPort`, see there for what its methods promise."""

    _role = handshake_pb2.SESSION_ROLE_SCHEDULER

    def __init__(self, options: SessionOptions, engine: EngineIdentity) -> None:
        super().__init__(options, engine)
        # Both threads.
        self._outbox: deque[Request] = deque()
        self._woken = False
        self._resets = ResetDebt()
        self._pending_lookups = 0  # written by the loop
        # The loop.
        self._numbers = itertools.count(1)
        self._asked: dict[int, Unanswered] = {}
        self._to_send: deque[offload_pb2.PrefixMessage] = deque()
        self._wake_writer = asyncio.Event()
        self._is_leaving = False
        self._has_left = asyncio.Event()
        self._connection: Connection | None = None
        self._stream: Any = None

    # --- the scheduler's thread -------------------------------------------------------

    @property
    def accepting(self) -> bool:
        return self.state is SessionState.UP and not self._resets.is_owed

    @property
    def generation(self) -> int | None:
        return self._generation if self.accepting else None

    def start_lookup(
        self, generation: int, group: int, block_hashes: tuple[bytes, ...]
    ) -> PendingLookup:
        pending = PendingLookup(self._abandon)
        if not self.accepting:
            pending.result = LookupResult(reason=Reason.NOT_CONNECTED)
        elif not block_hashes:
            pending.result = LookupResult()
        elif self._pending_lookups + len(self._outbox) >= LOOKUPS_PENDING_MAX:
            pending.result = LookupResult(reason=Reason.OVERLOADED)
        else:
            self._ask(LookupAsked(pending, generation, group, block_hashes))
        return pending

    def _abandon(self, pending: PendingLookup) -> None:
        result = pending.result
        if result is None or result.lease_id is not None:
            self._ask(LookupAbandoned(pending))

    def renew(self, lease_id: int) -> PendingRenewal:
        pending = PendingRenewal()
        if self.state is SessionState.UP:
            self._ask(RenewAsked(pending, lease_id))
        else:
            pending.failed = RenewFailed.NOT_CONNECTED
        return pending

    def release(self, lease_ids: Sequence[int]) -> None:
        if lease_ids and self.state is SessionState.UP:
            self._ask(ReleaseAsked(tuple(lease_ids)))

    def reset(self, timeout_s: float = 1.0) -> bool:
        waiter = self._resets.ask()
        # Not up, it would be waited for in vain: the debt is paid at the next connection.
        if self.state is not SessionState.UP or self._io is None or self._io.runs_here():
            return False
        self._ask(ResetAsked(waiter))
        return waiter.ended.wait(timeout_s) and waiter.is_confirmed

    def _ask(self, request: Request) -> None:
        if self._io is None or self._is_inherited():
            self._refuse(request)
            return
        self._outbox.append(request)
        # The loop clears the flag before it empties the outbox, so nothing is left behind.
        if not self._woken:
            self._woken = True
            if not self._io.submit(self._take_outbox):
                while self._outbox:
                    self._refuse(self._outbox.popleft())

    def _refuse(self, request: Request) -> None:
        """End a request that cannot be sent. On either thread: who holds the request."""
        match request:
            case LookupAsked(pending=pending):
                pending.result = LookupResult(reason=Reason.NOT_CONNECTED)
            case RenewAsked(pending=renewal):
                renewal.failed = RenewFailed.NOT_CONNECTED
            case ResetAsked(waiter=waiter):
                waiter.end(is_confirmed=False)
            case LookupAbandoned() | ReleaseAsked():
                pass  # the lease has ended with its connection, or will expire

    # --- the loop: from the outbox to the stream --------------------------------------

    def _take_outbox(self) -> None:
        self._woken = False
        while self._outbox:
            request = self._outbox.popleft()
            if self._connection is None:
                self._refuse(request)
            else:
                self._take(request, self._connection)
        if self._to_send:
            self._wake_writer.set()

    def _take(self, request: Request, connection: Connection) -> None:
        match request:
            case LookupAsked():
                self._take_lookup(request, connection)
            case LookupAbandoned(pending=pending):
                self._take_abandon(pending, connection)
            case RenewAsked(pending=renewal, lease_id=lease_id):
                self._take_renew(renewal, lease_id, connection)
            case ReleaseAsked(lease_ids=lease_ids):
                self._release_now(lease_ids, connection)
            case ResetAsked(waiter=waiter):
                self._resets.enter(waiter)

    def _take_lookup(self, request: LookupAsked, connection: Connection) -> None:
        limits = connection.facts.limits
        # A hit that is too long for one load would fail as a whole.
        hashes = request.block_hashes[: min(limits.lookup_blocks_max, limits.load_blocks_max)]
        joined = b"".join(hashes)
        hash_bytes = len(hashes[0]) if hashes else 0
        if not joined or any(len(block_hash) != hash_bytes for block_hash in hashes):
            request.pending.result = LookupResult(reason=Reason.PROTOCOL)
            return
        number = self._enter_asked(request.pending)
        lookup = offload_pb2.LookupRequest(
            generation=request.generation,
            group=request.group,
            hashes=joined,
            hash_bytes=hash_bytes,
        )
        self._to_send.append(offload_pb2.PrefixMessage(number=number, lookup=lookup))

    def _take_renew(self, renewal: PendingRenewal, lease_id: int, connection: Connection) -> None:
        lease = lease_number(connection.facts.boot_id, lease_id)
        if lease is None:
            renewal.failed = RenewFailed.LEASE_NOT_FOUND
            return
        number = self._enter_asked(renewal)
        renew = offload_pb2.RenewRequest(lease_id=lease)
        self._to_send.append(offload_pb2.PrefixMessage(number=number, renew=renew))

    def _enter_asked(self, pending: PendingLookup | PendingRenewal) -> int:
        number = next(self._numbers)
        self._asked[number] = Unanswered(pending, self._options.clock())
        self._pending_lookups = len(self._asked)
        return number

    def _take_abandon(self, pending: PendingLookup, connection: Connection) -> None:
        if pending.result is not None:
            if pending.result.lease_id is not None:
                self._release_now([pending.result.lease_id], connection)
            return
        for number, asked in self._asked.items():
            if asked.pending is pending:
                # Its reply will be nobody's, and its lease is then released.
                del self._asked[number]
                self._pending_lookups = len(self._asked)
                return

    def _release_now(self, lease_ids: Sequence[int], connection: Connection) -> None:
        numbers = [lease_number(connection.facts.boot_id, lease_id) for lease_id in lease_ids]
        ours = [number for number in numbers if number is not None]
        if ours:
            release = offload_pb2.ReleaseRequest(lease_ids=ours)
            number = next(self._numbers)
            self._to_send.append(offload_pb2.PrefixMessage(number=number, release=release))
            self._wake_writer.set()

    async def _write(self) -> None:
        while True:
            await self._wake_writer.wait()
            self._wake_writer.clear()
            while self._to_send:
                await self._write_one(self._to_send.popleft())
            if self._is_leaving:
                await self._stream.done_writing()
                self._is_leaving = False
                self._has_left.set()

    async def _write_one(self, message: offload_pb2.PrefixMessage) -> None:
        try:
            async with asyncio.timeout(self._options.write_timeout_s):
                await self._stream.write(message)
        except TimeoutError:
            raise SessionClosed("the daemon does not read its stream") from None
        except asyncio.InvalidStateError:
            raise SessionClosed("the stream has ended") from None

    # --- the loop: from the stream to the results -------------------------------------

    async def _read(self, connection: Connection) -> None:
        while True:
            reply = await self._stream.read()
            if reply is grpc.aio.EOF:
                raise SessionClosed("the daemon ended the stream")
            asked = self._asked.pop(reply.number, None)
            self._pending_lookups = len(self._asked)
            if asked is None:
                self._take_orphan(reply, connection)
            elif isinstance(asked.pending, PendingLookup):
                asked.pending.result = self._lookup_result(reply, asked, connection)
            else:
                self._end_renewal(asked.pending, reply, asked)

    def _take_orphan(self, reply: offload_pb2.PrefixReply, connection: Connection) -> None:
        """A reply that nobody waits for any more; a lease that it grants goes back at once."""
        if reply.WhichOneof("message") == "lookup" and reply.lookup.lease_id:
            lease_id = lease_id_of(connection.facts.boot_id, reply.lookup.lease_id)
            self._release_now([lease_id], connection)

    def _lookup_result(
        self, reply: offload_pb2.PrefixReply, asked: Unanswered, connection: Connection
    ) -> LookupResult:
        match reply.WhichOneof("message"):
            case "lookup" if not reply.lookup.hit_blocks:
                return LookupResult()
            case "lookup" if reply.lookup.lease_id:
                return LookupResult(
                    reply.lookup.hit_blocks,
                    lease_id_of(connection.facts.boot_id, reply.lookup.lease_id),
                    asked.asked_s + reply.lookup.lease_ttl_ms / 1000,
                )
            case "error":
                return LookupResult(reason=_reason_of(reply.error.code))
            case _:
                return LookupResult(reason=Reason.PROTOCOL)

    @staticmethod
    def _end_renewal(
        renewal: PendingRenewal, reply: offload_pb2.PrefixReply, asked: Unanswered
    ) -> None:
        match reply.WhichOneof("message"):
            case "renew":
                renewal.lease_deadline_s = asked.asked_s + reply.renew.lease_ttl_ms / 1000
            case "error" if reply.error.code == _NOT_FOUND:
                renewal.failed = RenewFailed.LEASE_NOT_FOUND
            case _:
                renewal.failed = RenewFailed.REFUSED

    def _heard(self, connection: Connection) -> None:
        """End what was asked too long ago; its late reply is an orphan."""
        del connection
        overdue_s = self._options.clock() - self._options.lookup_timeout_s
        # In the order of asking, so the first that is not overdue ends the search.
        while self._asked:
            number, asked = next(iter(self._asked.items()))
            if asked.asked_s > overdue_s:
                break
            del self._asked[number]
            _end(asked.pending, Reason.DEADLINE)
        self._pending_lookups = len(self._asked)

    # --- the loop: the session's life ------------------------------------------------

    async def _open(self, connection: Connection) -> None:
        self._stream = connection.stub.Prefix(metadata=connection.metadata)

    def _works(self, connection: Connection) -> list[Coroutine[Any, Any, None]]:
        return [self._write(), self._read(connection), self._pay_resets(connection)]

    async def _pay_resets(self, connection: Connection) -> None:
        async def reset() -> None:
            response = await connection.stub.Reset(
                offload_pb2.ResetRequest(),
                metadata=connection.metadata,
                timeout=self._options.reset_timeout_s,
            )
            self._generation = max(self._generation, response.generation)

        await self._resets.pay_forever(reset)

    def _went_up(self, connection: Connection) -> None:
        self._is_leaving = False
        self._has_left.clear()
        self._wake_writer.clear()
        self._connection = connection

    def _went_down(self) -> None:
        self._connection = None
        self._take_outbox()
        self._to_send.clear()
        asked, self._asked = self._asked, {}
        self._pending_lookups = 0
        for entry in asked.values():
            _end(entry.pending, Reason.CONNECTION_LOST)
        self._resets.connection_lost()
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def _settle(self) -> None:
        """Nothing is lost with a scheduler's session: its leases end with the instance."""

    async def _leave(self) -> None:
        self._take_outbox()
        self._is_leaving = True
        self._wake_writer.set()
        await self._has_left.wait()


def _end(pending: PendingLookup | PendingRenewal, reason: Reason) -> None:
    if isinstance(pending, PendingLookup):
        pending.result = LookupResult(reason=reason)
    else:
        pending.failed = RenewFailed.NOT_CONNECTED


def _reason_of(code: int) -> Reason:
    return _REASON_OF_CODE.get(code, Reason.UNKNOWN)


_REASON_OF_CODE = {
    grpc.StatusCode.ABORTED.value[0]: Reason.STALE_GENERATION,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: Reason.OVERLOADED,
    grpc.StatusCode.UNAVAILABLE.value[0]: Reason.DRAINING,
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: Reason.PROTOCOL,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: Reason.PROTOCOL,
}

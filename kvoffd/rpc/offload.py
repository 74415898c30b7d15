"""The Offload service: what engines ask, as thin as it can be.

Keeps no state. Runs on the loop thread. Each stream has one task that writes to it:
two concurrent writes would end it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc.aio

from kvoffd.errors import KvoffdError, ProtocolMismatch, SessionNotFound
from kvoffd.rpc import convert
from kvoffd.rpc.methods import decode
from kvoffd.rpc.status import STREAM_BREAKS, status_code
from kvoffd.service.sessions import CloseCode
from kvoffd_proto.v1 import offload_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvoffd.service.instances import Instances
    from kvoffd.service.lookup import LookupService
    from kvoffd.service.namespaces import Namespaces
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.seats import Seat
    from kvoffd.service.sessions import Session, Sessions
    from kvoffd.service.streams import RankStream
    from kvoffd.service.transfer import TransferService

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OffloadServicer:
    """Methods are named as in the proto file; see rpc/methods.py for how they are called."""

    sessions: Sessions
    instances: Instances
    namespaces: Namespaces
    transfers: TransferService
    lookups: LookupService
    options: ServiceOptions
    boot_id: bytes

    async def Register(  # noqa: N802 - the proto file names it
        self, session: Session, request: pb.RegisterRequest
    ) -> pb.RegisterResponse:
        """Declares what the session is a part of."""
        registration = convert.registration(request, self.options)
        registered = await self.instances.register(session, registration)
        return pb.RegisterResponse(
            namespace_digest=registered.digest, generation=registered.generation
        )

    async def Heartbeat(  # noqa: N802 - as above
        self, session: Session, request: pb.HeartbeatRequest
    ) -> pb.HeartbeatResponse:
        """Proves that the daemon is the same, and tells what has changed."""
        del request
        instance = session.instance
        if instance is None:
            return pb.HeartbeatResponse(boot_id=self.boot_id)
        return pb.HeartbeatResponse(
            boot_id=self.boot_id,
            instance_complete=instance.is_complete,
            generation=self.namespaces.generation(instance.digest),
        )

    async def Lookup(  # noqa: N802 - as above
        self, session: Session, request: pb.LookupRequest
    ) -> pb.LookupResponse:
        """Grants a lease over the leading blocks that are ready."""
        return self._lookup(session, request)

    async def Renew(  # noqa: N802 - as above
        self, session: Session, request: pb.RenewRequest
    ) -> pb.RenewResponse:
        """Prolongs a lease."""
        return self._renew(session, request)

    async def Release(  # noqa: N802 - as above
        self, session: Session, request: pb.ReleaseRequest
    ) -> pb.ReleaseResponse:
        """Gives leases back."""
        return self._release(session, request)

    async def Reset(  # noqa: N802 - as above
        self, session: Session, request: pb.ResetRequest
    ) -> pb.ResetResponse:
        """Makes everything stored so far in the namespace unreachable."""
        del request
        reset = self.lookups.reset(session)
        return pb.ResetResponse(generation=reset.generation, blocks_dropped=reset.blocks_dropped)

    async def Prefix(  # noqa: N802 - as above
        self, session: Session, context: grpc.aio.ServicerContext
    ) -> None:
        """Answers a scheduler's questions one after the other; none of them waits."""
        self.instances.instance(session)

        async def answer_all() -> None:
            while (encoded := await context.read()) is not grpc.aio.EOF:
                message = decode(pb.PrefixMessage, cast("bytes", encoded))
                await context.write(self._answer(session, cast("pb.PrefixMessage", message)))

        await _until_ended(session, answer_all())

    async def Transfer(  # noqa: N802 - as above
        self, session: Session, context: grpc.aio.ServicerContext
    ) -> None:
        """Takes one rank's steps in, and sends the outcomes of their jobs."""
        seat = self.instances.seat(session)
        message = await _until_ended(session, _read(context))
        if message is None:
            return
        if message.WhichOneof("message") != "open":
            raise ProtocolMismatch("The first message of a stream must be StreamOpen.")
        stream = self.transfers.open_stream(seat, message.open.epoch)
        reader = asyncio.ensure_future(self._read_steps(session, seat, stream, context))
        reader.add_done_callback(_look_at)
        try:
            await context.write(pb.RankReply(opened=pb.StreamOpened(boot_id=self.boot_id)))
            while (outcomes := await stream.take()) is not None:
                await context.write(convert.completions(outcomes))
            if reader.done():
                # The reader has the sentence that the status is to carry.
                reader.result()
            reason = stream.close_reason or ""
            await context.write(pb.RankReply(closing=pb.StreamClosing(reason=reason)))
        finally:
            reader.cancel()
            self.transfers.lose_stream(seat, stream, "The stream is gone.")

    async def _read_steps(
        self, session: Session, seat: Seat, stream: RankStream, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            while (message := await _read(context)) is not None and not session.closed:
                kind = message.WhichOneof("message")
                if kind == "step":
                    step = convert.step(message.step, seat, self.options)
                    self.transfers.step(seat, stream, step)
                elif kind == "goodbye":
                    stream.say_goodbye()
                else:
                    raise ProtocolMismatch(f"A stream that is open takes no message {kind!r}.")
        except STREAM_BREAKS as error:
            self.sessions.close(session, CloseCode.PROTOCOL, str(error))
            raise
        finally:
            if not stream.goodbye:
                stream.close("The client has closed the stream.")

    def _answer(self, session: Session, message: pb.PrefixMessage) -> pb.PrefixReply:
        kind = message.WhichOneof("message")
        number = message.number
        try:
            if kind == "lookup":
                return pb.PrefixReply(number=number, lookup=self._lookup(session, message.lookup))
            if kind == "renew":
                return pb.PrefixReply(number=number, renew=self._renew(session, message.renew))
            if kind == "release":
                return pb.PrefixReply(
                    number=number, release=self._release(session, message.release)
                )
        except KvoffdError as error:
            code: Any = status_code(error).value[0]
            return pb.PrefixReply(number=number, error=pb.CallError(code=code, reason=str(error)))
        raise ProtocolMismatch(f"Message {number} of the stream asks nothing.")

    def _lookup(self, session: Session, request: pb.LookupRequest) -> pb.LookupResponse:
        hashes = convert.lookup_hashes(request, self.options)
        result = self.lookups.lookup(session, request.generation, request.group, hashes)
        return pb.LookupResponse(
            hit_blocks=result.hit_blocks,
            lease_id=result.lease_id or 0,
            lease_ttl_ms=math.floor(result.lease_ttl_s * 1000),
        )

    def _renew(self, session: Session, request: pb.RenewRequest) -> pb.RenewResponse:
        ttl_s = self.lookups.renew(session, request.lease_id)
        return pb.RenewResponse(lease_ttl_ms=math.floor(ttl_s * 1000))

    def _release(self, session: Session, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(released=self.lookups.release(session, convert.released(request)))


async def _until_ended(session: Session, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Raises SessionNotFound when the session ends before it is there."""
    working = asyncio.ensure_future(work)
    working.add_done_callback(_look_at)
    ended = asyncio.ensure_future(session.ended.wait())
    try:
        await asyncio.wait([working, ended], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise SessionNotFound(f"The session has ended: {session.close_reason}")
    finally:
        working.cancel()
        ended.cancel()


def _look_at(task: asyncio.Future[Any]) -> None:
    """A failure that comes too late to be reported is no failure to look at it."""
    if not task.cancelled():
        task.exception()


async def _read(context: grpc.aio.ServicerContext) -> pb.RankMessage | None:
    encoded = await context.read()
    if encoded is grpc.aio.EOF:
        return None
    return cast("pb.RankMessage", decode(pb.RankMessage, cast("bytes", encoded)))

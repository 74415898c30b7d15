"""An operator's session for asyncio programs: what kvoffctl asks, as messages.

Runs on the caller's loop, starts no thread and retries nothing: one connection,
a few questions, and goodbye. Engines use the sessions of their own kind.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvoffd_client.channel import open_channel, session_metadata
from kvoffd_client.errors import ClientError, DaemonUnreachable, Refused, SessionClosed
from kvoffd_client.handshake import Handshake
from kvoffd_client.paths import handshake_path, socket_path
from kvoffd_proto.v1 import admin_pb2, admin_pb2_grpc, handshake_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# A daemon that works answers in milliseconds, one that starts needs a moment.
TIMEOUT_S = 5.0
# A protobuf length of one byte has seven bits.
_NAME_BYTES_MAX = 127


class AdminSession:
    """An open session of role ADMIN; made by `open_admin`."""

    def __init__(self, channel: grpc.aio.Channel, token: str, timeout_s: float) -> None:
        self._stub = admin_pb2_grpc.AdminStub(channel)
        self._call: dict[str, Any] = {"metadata": session_metadata(token), "timeout": timeout_s}

    async def status(self) -> admin_pb2.StatusResponse:
        """The daemon as a whole."""
        with _explained():
            reply: admin_pb2.StatusResponse = await self._stub.Status(
                admin_pb2.StatusRequest(), **self._call
            )
        return reply

    async def instances(self) -> admin_pb2.InstancesResponse:
        """The engines that have an open session."""
        with _explained():
            reply: admin_pb2.InstancesResponse = await self._stub.Instances(
                admin_pb2.InstancesRequest(), **self._call
            )
        return reply

    async def namespaces(self) -> admin_pb2.NamespacesResponse:
        """The namespaces that the daemon knows."""
        with _explained():
            reply: admin_pb2.NamespacesResponse = await self._stub.Namespaces(
                admin_pb2.NamespacesRequest(), **self._call
            )
        return reply


@contextlib.asynccontextmanager
async def open_admin(
    socket: str | None = None, timeout_s: float = TIMEOUT_S
) -> AsyncIterator[AdminSession]:
    """A session with the daemon at the socket (argument, else KVOFFD_SOCKET, else the default).

    Raises:
        DaemonUnreachable: nobody answers there, or not within `timeout_s`.
        Refused: the daemon will not have us, with its own sentence.
        SessionClosed: the connection broke.
    """
    path = socket_path(socket)
    handshake = await Handshake.open(
        handshake_path(path), handshake_pb2.SESSION_ROLE_ADMIN, (), timeout_s
    )
    assert handshake.facts is not None, "an open handshake has facts"
    try:
        async with open_channel(path) as channel:
            yield AdminSession(channel, handshake.facts.token, timeout_s)
        handshake.goodbye("done")
    finally:
        handshake.close()


async def check_health(
    service: str, socket: str | None = None, timeout_s: float = TIMEOUT_S
) -> bool | None:
    """What grpc.health.v1 says of a service ("" is the whole daemon); None if it is not known.

    Needs no session, so it answers while the daemon has as many as it takes.

    Raises:
        DaemonUnreachable: nobody answers there, or not within `timeout_s`.
        Refused: the daemon answers something else than health.
    """
    path = socket_path(socket)
    async with open_channel(path) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=_health_request,
            response_deserializer=_health_reply,
        )
        try:
            return bool(await check(service, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise DaemonUnreachable(f"no daemon answers at {path}") from None
            raise _explain(error) from None


def _health_request(service: str) -> bytes:
    """HealthCheckRequest{service = 1}; the messages are in a package that the client lacks."""
    name = service.encode()
    assert len(name) <= _NAME_BYTES_MAX, "one byte holds the length"
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def _health_reply(reply: bytes) -> bool:
    """HealthCheckResponse{status = 1}, where 1 is SERVING."""
    return reply == b"\x08\x01"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn gRPC's errors into the client's."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _explain(error) from None


def _explain(error: grpc.aio.AioRpcError) -> ClientError:
    sentence = error.details() or "no reason was given"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return DaemonUnreachable(f"the daemon does not answer: {sentence}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DaemonUnreachable("the daemon did not answer in time")
        case grpc.StatusCode.UNAUTHENTICATED:
            return SessionClosed(f"the session has ended: {sentence}")
        case code:
            return Refused(code.name, sentence)

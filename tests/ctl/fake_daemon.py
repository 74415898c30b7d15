"""The two sockets of a daemon as kvoffctl sees them, with answers that a test chose.

Real sockets and a real gRPC server on one thread of its own; ended by `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvoffd_proto.v1 import admin_pb2, admin_pb2_grpc, handshake_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKEN = "a-token"  # noqa: S105 - a test's


@dataclass
class Answers:
    """What the daemon says."""

    status: admin_pb2.StatusResponse = field(default_factory=admin_pb2.StatusResponse)
    instances: admin_pb2.InstancesResponse = field(default_factory=admin_pb2.InstancesResponse)
    namespaces: admin_pb2.NamespacesResponse = field(default_factory=admin_pb2.NamespacesResponse)
    closing: handshake_pb2.Closing | None = None
    serving: dict[str, bool] = field(default_factory=dict)
    roles: list[int] = field(default_factory=list)


class Admin(admin_pb2_grpc.AdminServicer):
    """Answers whoever has the token."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def Status(self, request, context):  # noqa: N802, ARG002 - gRPC's form
        return await self._answer(context, self._answers.status)

    async def Instances(self, request, context):  # noqa: N802, ARG002 - gRPC's form
        return await self._answer(context, self._answers.instances)

    async def Namespaces(self, request, context):  # noqa: N802, ARG002 - gRPC's form
        return await self._answer(context, self._answers.namespaces)

    async def _answer(self, context, answer):
        if dict(context.invocation_metadata()).get("kvoffd-session") != TOKEN:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such session")
        return answer


@contextlib.contextmanager
def fake_daemon(path: Path, answers: Answers) -> Iterator[None]:
    """Both sockets, until the block ends."""
    ready = threading.Event()
    stops: list[Callable[[], object]] = []
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(path, answers, ready, stops)), name="fake-daemon"
    )
    thread.start()
    try:
        assert ready.wait(20), "the fake daemon did not start"
        yield
    finally:
        for stop in stops:
            stop()
        thread.join()


async def _serve(
    path: Path, answers: Answers, ready: threading.Event, stops: list[Callable[[], object]]
):
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(answers), server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.UNKNOWN)
    for service, is_serving in answers.serving.items():
        state = health_pb2.HealthCheckResponse
        await servicer.set(service, state.SERVING if is_serving else state.NOT_SERVING)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{path}.handshake")
        listener.listen()
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        stops.append(lambda: loop.call_soon_threadsafe(ended.set))
        loop.add_reader(listener, lambda: _take_session(listener, answers))
        ready.set()
        await ended.wait()
        loop.remove_reader(listener)
    await server.stop(None)


def _take_session(listener: socket.socket, answers: Answers) -> None:
    """One Hello and its reply; kvoffctl sends both before it waits for anything."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(10)
        hello = handshake_pb2.HandshakeRequest.FromString(connection.recv(65536)).hello
        answers.roles.append(hello.role)
        if answers.closing:
            reply = handshake_pb2.HandshakeReply(closing=answers.closing)
        else:
            welcome = handshake_pb2.Welcome(protocol=1, session_token=TOKEN, boot_id=b"b" * 16)
            welcome.limits.heartbeat_ms = 1000
            reply = handshake_pb2.HandshakeReply(welcome=welcome)
        connection.send(reply.SerializeToString())

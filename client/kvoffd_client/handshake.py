"""One connection of the handshake socket, from Hello to Goodbye.

Lives on the background loop. Owns its socket and the pidfds that came over it.
One message a SEQPACKET frame. It sends nothing that could wait: a frame that
the daemon does not take at once is a lost connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import weakref
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvoffd_client.copiers import CopierBook
from kvoffd_client.errors import (
    ClientError,
    DaemonAbsent,
    DaemonUnreachable,
    Refused,
    SessionClosed,
)
from kvoffd_client.ports import Limits
from kvoffd_proto.v1 import handshake_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
FEATURES: tuple[str, ...] = ()
_FRAME_BYTES_MAX = 64 * 1024
_FDS_MAX = 4
_PEERCRED_BYTES = struct.calcsize("iII")
# The daemon turned us away, but may take us later.
_CURABLE = frozenset({"LIMIT", "DRAINING", "DEAD"})

# Closed in a forked child, so that it does not keep the parent's connection open.
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for inherited in list(_open_sockets):
        inherited.close()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True, slots=True)
class OfferedMemory:
    """A memory to offer; its place in the sequence is its index."""

    kind: handshake_pb2.MemoryKind
    fd: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WelcomeFacts:
    """What the daemon said of itself and of the session."""

    boot_id: bytes
    token: str
    features: tuple[str, ...]
    daemon_version: str
    limits: Limits


class Handshake:
    """An open connection. `ended` is done, with an exception, when the daemon ends it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[handshake_pb2.Welcome] = self._loop.create_future()
        self._accepted: dict[int, asyncio.Future[None]] = {}
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # Whoever looks at none of them must not be told by the garbage collector.
        self.ended.add_done_callback(_look)
        self._welcome.add_done_callback(_look)
        self.copiers = CopierBook()
        self.facts: WelcomeFacts | None = None
        _open_sockets.add(connection)
        self._loop.add_reader(connection, self._read)

    @classmethod
    async def open(
        cls,
        path: str,
        role: handshake_pb2.SessionRole,
        memories: Sequence[OfferedMemory],
        timeout_s: float,
    ) -> Handshake:
        """Connect, say hello, offer the memories, all within `timeout_s`.

        Raises:
            DaemonUnreachable: Nobody listens, or there was no answer in time.
            Refused: The daemon closed with a reason.
            SessionClosed: It closed without one.
        """
        handshake = cls(_connect(path))
        try:
            async with asyncio.timeout(timeout_s):
                await handshake._introduce(role, memories)
        except TimeoutError:
            handshake.close()
            raise DaemonUnreachable(f"no answer to the handshake within {timeout_s:g} s") from None
        except BaseException:
            handshake.close()
            raise
        return handshake

    async def _introduce(
        self, role: handshake_pb2.SessionRole, memories: Sequence[OfferedMemory]
    ) -> None:
        hello = handshake_pb2.Hello(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            features=FEATURES,
            client_version=_client_version(),
            role=role,
        )
        with _own_pidfd() as pidfds:
            self._send(handshake_pb2.HandshakeRequest(hello=hello), pidfds)
        self.facts = _checked(await self._welcome)
        if len(memories) > self.facts.limits.memories_max:
            raise Refused(
                "LIMIT",
                f"{len(memories)} memories are to be offered, "
                f"and the daemon takes {self.facts.limits.memories_max}",
            )
        for index, memory in enumerate(memories):
            accepted = self._loop.create_future()
            accepted.add_done_callback(_look)
            self._accepted[index] = accepted
            offer = handshake_pb2.Offer(
                memory_index=index, kind=memory.kind, size_bytes=memory.size_bytes
            )
            self._send(handshake_pb2.HandshakeRequest(offer=offer), [memory.fd])
            await accepted

    def goodbye(self, reason: str) -> None:
        """Tell the daemon that the end is meant. No answer, no exception."""
        frame = handshake_pb2.HandshakeRequest(goodbye=handshake_pb2.Goodbye(reason=reason))
        with contextlib.suppress(ClientError):
            self._send(frame)

    def close(self) -> None:
        """Close the connection; the copiers' pidfds stay with the book. May be called twice."""
        self._end(SessionClosed("closed by us"))

    def _send(self, frame: handshake_pb2.HandshakeRequest, fds: Sequence[int] = ()) -> None:
        if self.ended.done():
            raise SessionClosed("the connection has ended")
        try:
            socket.send_fds(self._socket, [frame.SerializeToString()], list(fds))
        except OSError as error:
            # EAGAIN included: a daemon that leaves a handful of small frames unread is stuck.
            lost = SessionClosed(f"the handshake socket broke: {error.strerror}")
            self._end(lost)
            raise lost from error

    def _read(self) -> None:
        """Take all frames that are there. Called by the loop when the socket is readable."""
        while not self.ended.done():
            try:
                payload, fds, flags, _ = socket.recv_fds(
                    self._socket, _FRAME_BYTES_MAX, _FDS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(SessionClosed(f"the handshake socket broke: {error.strerror}"))
                return
            try:
                self._take_frame(payload, fds, flags)
            finally:
                for fd in fds:
                    os.close(fd)

    def _take_frame(self, payload: bytes, fds: list[int], flags: int) -> None:
        """Act on one frame. Descriptors that are to stay are taken out of `fds`."""
        if not payload and not fds:
            self._end(SessionClosed("the daemon closed the connection"))
            return
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._end(SessionClosed("the daemon sent more than a handshake frame may hold"))
            return
        try:
            reply = handshake_pb2.HandshakeReply.FromString(payload)
        except DecodeError:
            self._end(SessionClosed("the daemon sent something that is no handshake frame"))
            return
        match reply.WhichOneof("frame"):
            case "welcome" if not self._welcome.done():
                self._welcome.set_result(reply.welcome)
            case "accepted":
                self._take_accepted(reply.accepted.memory_index)
            case "copier_up" if len(fds) == 1:
                incarnation = reply.copier_up.incarnation
                self.copiers.add(incarnation, fds.pop())
                self._tell_copier_seen(incarnation)
            case "closing":
                code = _close_code_name(reply.closing.code)
                self._end(Refused(code, reply.closing.reason, curable=code in _CURABLE))
            case None:
                pass  # a frame of a later protocol: nothing that we must understand
            case kind:
                self._end(SessionClosed(f"the daemon sent a {kind} out of place"))

    def _take_accepted(self, memory_index: int) -> None:
        accepted = self._accepted.get(memory_index)
        if accepted is None or accepted.done():
            self._end(SessionClosed("the daemon accepted a memory that was not offered"))
            return
        accepted.set_result(None)

    def _tell_copier_seen(self, incarnation: int) -> None:
        seen = handshake_pb2.CopierSeen(incarnation=incarnation)
        with contextlib.suppress(ClientError):  # the end shows in `ended`
            self._send(handshake_pb2.HandshakeRequest(copier_seen=seen))

    def _end(self, error: ClientError) -> None:
        if self.ended.done():
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self.ended.set_exception(error)
        if not self._welcome.done():
            self._welcome.set_exception(error)
        for accepted in self._accepted.values():
            if not accepted.done():
                accepted.set_exception(error)


def _look(future: asyncio.Future[None] | asyncio.Future[handshake_pb2.Welcome]) -> None:
    if not future.cancelled():
        future.exception()


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(0)
        # Never waits: it succeeds, or fails at once when nobody listens or the backlog is full.
        connection.connect(path)
        _check_peer(connection, path)
    except OSError as error:
        connection.close()
        raise DaemonAbsent(f"no daemon at {path}: {error.strerror}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_peer(connection: socket.socket, path: str) -> None:
    """Refuse a stranger's daemon below a folder where anybody may make sockets."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED_BYTES)
    _, uid, _ = struct.unpack("iII", credentials)
    if uid in {0, os.geteuid()}:
        return
    public = Path(path).parent.parent
    if public.stat().st_mode & stat.S_IWOTH:
        raise Refused(
            "FORBIDDEN", f"the daemon at {path} runs as user {uid}, and anybody may write {public}"
        )


@contextlib.contextmanager
def _own_pidfd() -> Iterator[list[int]]:
    """Our own pidfd, where the kernel has such a thing."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError:
        yield []
        return
    try:
        yield [pidfd]
    finally:
        os.close(pidfd)


def _checked(welcome: handshake_pb2.Welcome) -> WelcomeFacts:
    """The welcome as facts; nothing that comes from outside is believed unchecked."""
    if not PROTOCOL_MIN <= welcome.protocol <= PROTOCOL_MAX:
        raise Refused("VERSION", f"the daemon chose protocol {welcome.protocol}, we speak 1")
    limits = welcome.limits
    if not welcome.session_token or not welcome.boot_id or not limits.heartbeat_ms:
        raise SessionClosed("the daemon's welcome lacks a token, a boot id or a heartbeat time")
    return WelcomeFacts(
        boot_id=welcome.boot_id,
        token=welcome.session_token,
        features=tuple(welcome.features),
        daemon_version=welcome.daemon_version,
        limits=Limits(
            store_blocks_max=limits.store_blocks_max,
            load_blocks_max=limits.load_blocks_max,
            lookup_blocks_max=limits.lookup_blocks_max,
            jobs_in_flight_max=limits.jobs_in_flight_max,
            heartbeat_s=limits.heartbeat_ms / 1000,
            lease_ttl_s=limits.lease_ttl_ms / 1000,
            memories_max=limits.memories_max,
        ),
    )


def _close_code_name(code: int) -> str:
    try:
        return handshake_pb2.CloseCode.Name(code).removeprefix("CLOSE_CODE_")
    except ValueError:  # a newer daemon's code
        return str(code)


def _client_version() -> str:
    try:
        return metadata.version("kvoffd")
    except metadata.PackageNotFoundError:  # used from a source tree
        return "unknown"

"""Connection: one peer of the handshake socket, from accept to close.

Owns the socket, the pidfd of its process, and what waits to be sent. Runs on the loop
thread by readiness callbacks, since uvloop has no transport for SEQPACKET. Never waits:
a peer that does not read is dropped when its queue is full.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING

import structlog
from google.protobuf.message import DecodeError

from kvoffd import __version__
from kvoffd.errors import (
    Draining,
    Forbidden,
    KvoffdError,
    MemoryRefused,
    Overloaded,
    ProtocolMismatch,
)
from kvoffd.rpc import seqpacket
from kvoffd.rpc.auth import check_peer
from kvoffd.rpc.offered import check_memory, is_pidfd_of
from kvoffd.service.sessions import CloseCode, Memory, MemoryKind, Peer, Role
from kvoffd_proto.v1 import handshake_pb2 as pb

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Sequence

    from kvoffd.rpc.options import RpcOptions
    from kvoffd.service.load import LoadService
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.sessions import Session, Sessions

log = structlog.get_logger(__name__)

PROTOCOL_VERSION = 1
#: Names that both sides may agree on; none is needed yet.
FEATURES: frozenset[str] = frozenset()
FEATURES_MAX = 64
#: Frames for a peer that does not read.
QUEUE_FRAMES_MAX = 64

_ROLES = {
    pb.SESSION_ROLE_SCHEDULER: Role.SCHEDULER,
    pb.SESSION_ROLE_RANK: Role.RANK,
    pb.SESSION_ROLE_ADMIN: Role.ADMIN,
}
_KINDS = {pb.MEMORY_KIND_POOL: MemoryKind.POOL, pb.MEMORY_KIND_TICKETS: MemoryKind.TICKETS}
_CODES = {
    CloseCode.PROTOCOL: pb.CLOSE_CODE_PROTOCOL,
    CloseCode.VERSION: pb.CLOSE_CODE_VERSION,
    CloseCode.FORBIDDEN: pb.CLOSE_CODE_FORBIDDEN,
    CloseCode.LIMIT: pb.CLOSE_CODE_LIMIT,
    CloseCode.DRAINING: pb.CLOSE_CODE_DRAINING,
    CloseCode.MEMORY: pb.CLOSE_CODE_MEMORY,
    CloseCode.DEAD: pb.CLOSE_CODE_DEAD,
}
_CODE_OF_ERROR: dict[type[KvoffdError], CloseCode] = {
    Draining: CloseCode.DRAINING,
    Forbidden: CloseCode.FORBIDDEN,
    MemoryRefused: CloseCode.MEMORY,
    Overloaded: CloseCode.LIMIT,
}


class _VersionMismatch(ProtocolMismatch):
    """No version that both sides speak."""


class Connection:
    """Implements kvoffd.service.sessions.Link."""

    def __init__(
        self,
        connection: socket.socket,
        loop: asyncio.AbstractEventLoop,
        sessions: Sessions,
        loads: LoadService,
        rpc_options: RpcOptions,
        options: ServiceOptions,
        boot_id: bytes,
        closed: Callable[[Connection], None],
    ) -> None:
        self._socket = connection
        self._loop = loop
        self._sessions = sessions
        self._loads = loads
        self._rpc_options = rpc_options
        self._options = options
        self._boot_id = boot_id
        self._closed = closed
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._session: Session | None = None
        self._pidfd: int | None = None
        self._is_closed = False
        self._hello_timer = loop.call_later(rpc_options.hello_timeout_s, self._hello_overdue)
        loop.add_reader(connection, self._readable)

    # --- Link -----------------------------------------------------------------------

    def copier_up(self, incarnation: int, pidfd: int) -> None:
        self._send(pb.HandshakeReply(copier_up=pb.CopierUp(incarnation=incarnation)), [pidfd])

    def close(self, code: CloseCode | None, reason: str) -> None:
        """Say why, as far as the peer still listens, and let go of everything."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hello_timer.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        for _, fds in self._queue:
            seqpacket.close_fds(fds)
        if code is not None and not self._queue:
            closing = pb.HandshakeReply(closing=pb.Closing(code=_CODES[code], reason=reason))
            with contextlib.suppress(OSError):
                seqpacket.send(self._socket, closing.SerializeToString())
                seqpacket.discard(self._socket)
        self._queue.clear()
        self._socket.close()
        # An operator's look is no event: they may ask every few seconds.
        is_look = self._session is not None and self._session.role is Role.ADMIN and code is None
        say = log.debug if is_look else log.info
        say("session closed", code=code.value if code else None, reason=reason)
        self._closed(self)

    # --- Receiving --------------------------------------------------------------------

    def _readable(self) -> None:
        fds: list[int] = []
        try:
            payload, fds = seqpacket.receive(self._socket)
            # An end and an empty frame look alike; in either case nothing is to be done.
            if not payload:
                self._end(None, "The peer has closed the connection.")
                return
            self._handle(self._decode(payload), fds)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(None, f"The connection is broken: {error.strerror}.")
        except KvoffdError as error:
            self._refuse(error)
        finally:
            seqpacket.close_fds(fds)

    def _decode(self, payload: bytes) -> pb.HandshakeRequest:
        try:
            return pb.HandshakeRequest.FromString(payload)
        except DecodeError as error:
            raise ProtocolMismatch(
                f"{len(payload)} bytes are no handshake request: {error}."
            ) from error

    def _handle(self, request: pb.HandshakeRequest, fds: list[int]) -> None:
        """Descriptors that are kept are taken out of the list."""
        kind = request.WhichOneof("frame")
        if kind == "hello":
            self._hello(request.hello, fds)
            return
        session = self._session
        if session is None:
            raise ProtocolMismatch("The first frame must be Hello.")
        if kind == "offer":
            self._offer(session, request.offer, fds)
        elif fds:
            raise ProtocolMismatch(f"A frame {kind!r} brings no descriptor.")
        elif kind == "copier_seen":
            self._loads.copier_seen(session, request.copier_seen.incarnation)
        elif kind == "goodbye":
            self._end(None, "The client has said goodbye.")
        else:
            raise ProtocolMismatch("A frame is empty, or of a kind unknown here.")

    def _hello(self, hello: pb.Hello, fds: list[int]) -> None:
        if self._session is not None:
            raise ProtocolMismatch("Hello is said once.")
        pid, uid, gid = seqpacket.peer_credentials(self._socket)
        peer = Peer(uid, gid, pid)
        check_peer(peer, self._rpc_options)
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            raise _VersionMismatch(
                f"The daemon speaks protocol {PROTOCOL_VERSION}, the client "
                f"{hello.protocol_min} to {hello.protocol_max}."
            )
        role = _ROLES.get(hello.role)
        if role is None:
            raise ProtocolMismatch(f"Role {hello.role} is unknown.")
        if len(hello.features) > FEATURES_MAX:
            raise ProtocolMismatch(f"{len(hello.features)} features are too many.")
        self._pidfd = self._take_pidfd(pid, fds)
        self._session = self._sessions.open(role, peer, self._pidfd, self)
        self._hello_timer.cancel()
        self._loop.add_reader(self._pidfd, self._process_ended)
        self._send(pb.HandshakeReply(welcome=self._welcome(self._session, hello)))

    def _take_pidfd(self, pid: int, fds: list[int]) -> int:
        if len(fds) > 1:
            raise ProtocolMismatch(f"Hello brings {len(fds)} descriptors; one pidfd is allowed.")
        pidfd = seqpacket.peer_pidfd(self._socket)
        if pidfd is None and fds and is_pidfd_of(fds[0], pid):
            pidfd = fds.pop()
        if pidfd is None:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                raise ProtocolMismatch(
                    f"Process {pid} cannot be watched: {error.strerror}."
                ) from error
        return pidfd

    def _welcome(self, session: Session, hello: pb.Hello) -> pb.Welcome:
        options = self._options
        return pb.Welcome(
            protocol=PROTOCOL_VERSION,
            features=sorted(FEATURES.intersection(hello.features)),
            daemon_version=__version__,
            boot_id=self._boot_id,
            session_token=session.token,
            limits=pb.SessionLimits(
                store_blocks_max=options.store_blocks_max,
                load_blocks_max=options.load_blocks_max,
                lookup_blocks_max=options.lookup_blocks_max,
                jobs_in_flight_max=options.jobs_in_flight_max,
                heartbeat_ms=round(options.heartbeat_s * 1000),
                lease_ttl_ms=round(options.lease_ttl_s * 1000),
                memories_max=options.memories_max,
            ),
        )

    def _offer(self, session: Session, offer: pb.Offer, fds: list[int]) -> None:
        if len(fds) != 1:
            raise ProtocolMismatch(f"An Offer brings one descriptor, not {len(fds)}.")
        kind = _KINDS.get(offer.kind)
        if kind is None:
            raise ProtocolMismatch(f"Memory kind {offer.kind} is unknown.")
        check_memory(fds[0], offer.size_bytes, self._options.memory_bytes_max, session.peer.uid)
        memory = Memory(offer.memory_index, kind, offer.size_bytes, fds[0])
        self._sessions.add_memory(session, memory)
        fds.clear()
        self._send(pb.HandshakeReply(accepted=pb.Accepted(memory_index=offer.memory_index)))

    # --- Sending ----------------------------------------------------------------------

    def _send(self, reply: pb.HandshakeReply, fds: Sequence[int] = ()) -> None:
        if self._is_closed:
            return
        payload = reply.SerializeToString()
        if not self._queue:
            try:
                seqpacket.send(self._socket, payload, fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._writable)
            except OSError as error:
                self._end_soon(f"The connection is broken: {error.strerror}.")
                return
            else:
                return
        if len(self._queue) >= QUEUE_FRAMES_MAX:
            self._end_soon("The peer does not read its handshake connection.")
            return
        try:
            # The caller's descriptor may be closed before its turn comes.
            kept = [os.dup(fd) for fd in fds]
        except OSError as error:
            self._end_soon(f"A descriptor cannot be kept: {error.strerror}.")
            return
        self._queue.append((payload, kept))

    def _writable(self) -> None:
        try:
            while self._queue:
                payload, fds = self._queue[0]
                seqpacket.send(self._socket, payload, fds)
                self._queue.popleft()
                seqpacket.close_fds(fds)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(None, f"The connection is broken: {error.strerror}.")
            return
        self._loop.remove_writer(self._socket)

    # --- Ending -----------------------------------------------------------------------

    def _end_soon(self, reason: str) -> None:
        """From within a call of the service, which must not see its session end meanwhile."""
        self._loop.call_soon(self._end, None, reason)

    def _end(self, code: CloseCode | None, reason: str) -> None:
        if self._session is not None:
            self._sessions.close(self._session, code, reason)
        else:
            self.close(code, reason)

    def _refuse(self, error: KvoffdError) -> None:
        if isinstance(error, _VersionMismatch):
            code = CloseCode.VERSION
        else:
            code = _CODE_OF_ERROR.get(type(error), CloseCode.PROTOCOL)
        self._end(code, str(error))

    def _process_ended(self) -> None:
        self._end(CloseCode.DEAD, "The process has ended.")

    def _hello_overdue(self) -> None:
        self._end(CloseCode.PROTOCOL, "No Hello came in time.")

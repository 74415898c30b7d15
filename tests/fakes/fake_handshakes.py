"""The handshake socket of the fake daemon, on a thread of its own."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffd_proto.v1 import handshake_pb2

if TYPE_CHECKING:
    from tests.fakes.fake_daemon import FakeDaemon


class FakeHandshakes:
    """The handshake socket, on one thread."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self._path = daemon.socket_path + ".handshake"
        Path(self._path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._path)
        self._listener.listen(16)
        self._wake_in, self._wake_out = socket.socketpair()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fake-handshakes")
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while not self._daemon.stopping.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        with self._lock:
                            self._connections.add(connection)
                        selector.register(connection, selectors.EVENT_READ)
                    elif key.fileobj is not self._wake_out:
                        self._read(key.fileobj, selector)

    def _read(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            payload, fds, _, _ = socket.recv_fds(connection, 65536, 4)
        except OSError:
            payload, fds = b"", []
        if not payload:
            selector.unregister(connection)
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            return
        request = handshake_pb2.HandshakeRequest.FromString(payload)
        with contextlib.suppress(OSError):
            self._take(connection, request, fds)

    def _take(
        self, connection: socket.socket, request: handshake_pb2.HandshakeRequest, fds: list[int]
    ) -> None:
        daemon = self._daemon
        match request.WhichOneof("frame"):
            case "hello":
                for fd in fds:
                    os.close(fd)
                daemon.note(lambda seen: seen.hellos.append(request.hello))
                self._answer_hello(connection)
            case "offer":
                daemon.note(lambda seen: seen.offers.append((request.offer, fds[0])))
                self._answer_offer(connection, request.offer.memory_index)
            case "goodbye":
                daemon.note(lambda seen: seen.goodbyes.append(request.goodbye.reason))
            case "copier_seen":
                incarnation = request.copier_seen.incarnation
                daemon.note(lambda seen: seen.copiers_seen.append(incarnation))

    def _answer_hello(self, connection: socket.socket) -> None:
        do = self._daemon.do
        limits = handshake_pb2.SessionLimits(
            store_blocks_max=do.store_blocks_max,
            load_blocks_max=64,
            lookup_blocks_max=512,
            jobs_in_flight_max=do.jobs_in_flight_max,
            heartbeat_ms=do.heartbeat_ms,
            lease_ttl_ms=do.lease_ttl_ms,
            memories_max=8,
        )
        welcome = handshake_pb2.Welcome(
            protocol=1, boot_id=do.boot_id, session_token=str(len(self._connections)), limits=limits
        )
        match do.hello:
            case "welcome":
                _send(connection, handshake_pb2.HandshakeReply(welcome=welcome))
            case "refuse":
                closing = handshake_pb2.Closing(code=do.close_code, reason="you may not")
                _send(connection, handshake_pb2.HandshakeReply(closing=closing))
            case "garbage":
                connection.send(b"\xff" * 100)
            case "flood":
                connection.send(b"\x00" * 100_000)
            case "close":
                connection.shutdown(socket.SHUT_RDWR)

    def _answer_offer(self, connection: socket.socket, memory_index: int) -> None:
        match self._daemon.do.offers:
            case "accept":
                accepted = handshake_pb2.Accepted(memory_index=memory_index)
                _send(connection, handshake_pb2.HandshakeReply(accepted=accepted))
            case "refuse":
                closing = handshake_pb2.Closing(
                    code=handshake_pb2.CLOSE_CODE_MEMORY, reason="it can shrink"
                )
                _send(connection, handshake_pb2.HandshakeReply(closing=closing))

    def send_all(self, reply: handshake_pb2.HandshakeReply, fds: list[int] | None = None) -> None:
        with self._lock:
            for connection in self._connections:
                _send(connection, reply, fds)

    def send_raw(self, payload: bytes) -> None:
        with self._lock:
            for connection in self._connections:
                connection.send(payload)

    def drop_all(self) -> None:
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._wake_in.send(b"x")
        self._thread.join()
        for end in (*self._connections, self._listener, self._wake_in, self._wake_out):
            end.close()
        Path(self._path).unlink(missing_ok=True)


def _send(
    connection: socket.socket, reply: handshake_pb2.HandshakeReply, fds: list[int] | None = None
) -> None:
    socket.send_fds(connection, [reply.SerializeToString()], fds or [])

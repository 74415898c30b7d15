"""The handshake server: listens, and makes a Connection of each peer.

Owns the listening socket, its file, and the set of connections. Runs on the loop thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from kvoffd.rpc import permissions
from kvoffd.rpc.connection import Connection
from kvoffd.service.sessions import CloseCode

if TYPE_CHECKING:
    import asyncio

    from kvoffd.rpc.options import RpcOptions
    from kvoffd.service.load import LoadService
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.sessions import Sessions

log = structlog.get_logger(__name__)

#: Connections beyond sessions_max that may be about to say Hello.
STRANGERS_MAX = 64
#: Accepted in one turn of the loop; more would starve the RPCs beside us.
ACCEPTS_A_TURN = 16
#: Pause after a failure to accept, such as too many open files.
ACCEPT_PAUSE_S = 0.1


class HandshakeServer:
    """All connections of the handshake socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sessions: Sessions,
        loads: LoadService,
        rpc_options: RpcOptions,
        options: ServiceOptions,
        boot_id: bytes,
    ) -> None:
        self._loop = loop
        self._sessions = sessions
        self._loads = loads
        self._rpc_options = rpc_options
        self._options = options
        self._boot_id = boot_id
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listens. The socket's path must be free. Raises OSError."""
        path = self._rpc_options.handshake_socket
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            with permissions.private_files():
                listener.bind(path)
            permissions.open_to_group(path, self._rpc_options.socket_gid)
            listener.listen(self._rpc_options.backlog)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener, self._acceptable)

    def stop(self, reason: str) -> None:
        """Closes the socket, removes its file, and closes all connections."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                Path(self._rpc_options.handshake_socket).unlink()
        self._sessions.close_all(CloseCode.DRAINING, reason)
        for connection in tuple(self._connections):
            connection.close(CloseCode.DRAINING, reason)

    def _acceptable(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            if self._listener is None:
                return
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("cannot accept", reason=os.strerror(error.errno or 0))
                self._loop.remove_reader(self._listener)
                self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        accepted.settimeout(0)
        connection = Connection(
            accepted,
            self._loop,
            self._sessions,
            self._loads,
            self._rpc_options,
            self._options,
            self._boot_id,
            self._connections.discard,
        )
        self._connections.add(connection)
        if len(self._connections) > self._options.sessions_max + STRANGERS_MAX:
            connection.close(CloseCode.LIMIT, "There are too many connections.")

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._acceptable)

"""Settings of the two sockets; kvoffd.main fills them in from the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """Where the daemon listens, and who may come."""

    #: Path of the gRPC socket; the handshake socket is this plus ".handshake".
    socket: str
    #: User ids beside the daemon's own and root.
    allowed_uids: frozenset[int] = frozenset()
    #: Group ids, by the peer's primary group.
    allowed_gids: frozenset[int] = frozenset()
    #: Group of the sockets (mode 0660); None keeps them to the daemon's user (0600).
    socket_gid: int | None = None
    #: A connection that has not said Hello by then is closed.
    hello_timeout_s: float = 5.0
    #: Connections of the handshake socket waiting to be accepted.
    backlog: int = 128
    #: Largest gRPC message received.
    message_bytes_max: int = 4 << 20

    @property
    def handshake_socket(self) -> str:
        return self.socket + ".handshake"

    @property
    def lock_file(self) -> str:
        return self.socket + ".lock"

"""What can go wrong with a session, for callers that can act on it.

Nothing here ever reaches an engine thread by itself: sessions keep their
failures in the background thread and show them as states and outcomes. The
exceptions cross a door only where a caller waits by choice.
"""

from __future__ import annotations


class ClientError(Exception):
    """Base of all failures. The message is a sentence for a person."""


class DaemonUnreachable(ClientError):
    """No daemon answers at the socket, or not in time."""


class DaemonAbsent(DaemonUnreachable):
    """Nobody listens at the socket. To ask again costs next to nothing."""


class SessionClosed(ClientError):
    """The session has ended: by the daemon, by a broken connection, or by close()."""


class Refused(ClientError):
    """The daemon said no.

    Attributes:
        code: The name of the close code or of the gRPC status.
        reason: The daemon's own sentence.
        curable: Whether the same request may succeed a little later.
    """

    def __init__(self, code: str, reason: str, *, curable: bool = False) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason
        self.curable = curable


class MemoryFailed(ClientError):
    """Shared memory cannot be had from this kernel, or not that much of it."""

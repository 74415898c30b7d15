"""Sessions: one process's handshake connection each, from Hello to its end.

Owns the table of sessions and the descriptors that a session brought in. Runs on the
loop thread. Knows nothing of sockets: a Link stands for the connection. It must not
touch blocks; whoever has to clean up after a session listens to `Sessions.closed`.
"""

from __future__ import annotations

import asyncio
import enum
import os
import secrets
import select
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvoffd.errors import Draining, Overloaded, ProtocolMismatch, SessionNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd.service.instances import Instance
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.seats import Seat


class Role(enum.Enum):
    """What a process is to its engine."""

    SCHEDULER = "scheduler"
    RANK = "rank"
    ADMIN = "admin"


class CloseCode(enum.Enum):
    """Why the daemon ends a session."""

    PROTOCOL = "protocol"
    VERSION = "version"
    FORBIDDEN = "forbidden"
    LIMIT = "limit"
    DRAINING = "draining"
    MEMORY = "memory"
    DEAD = "dead"


class MemoryKind(enum.Enum):
    """What an offered memory is for."""

    POOL = "pool"
    TICKETS = "tickets"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by the kernel's word."""

    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class Memory:
    """One shared memory of a session. The session owns the descriptor."""

    memory_index: int
    kind: MemoryKind
    size_bytes: int
    fd: int


class Link(Protocol):
    """The connection, as a session sees it. Never blocks, never raises."""

    def copier_up(self, incarnation: int, pidfd: int) -> None:
        """A copier serves the session from now on; the caller keeps the descriptor."""

    def close(self, code: CloseCode | None, reason: str) -> None:
        """The session has ended; without a code, the peer knows."""


class Session:
    """One process in one role. Changed by the service alone."""

    __slots__ = (
        "_pidfd",
        "close_reason",
        "closed",
        "copier_seen",
        "ended",
        "instance",
        "link",
        "memories",
        "peer",
        "registering",
        "role",
        "seat",
        "token",
    )

    def __init__(self, token: str, role: Role, peer: Peer, pidfd: int, link: Link) -> None:
        self.token = token
        self.role = role
        self.peer = peer
        self.link = link
        self._pidfd = pidfd
        self.memories: dict[int, Memory] = {}
        self.registering = False
        self.instance: Instance | None = None
        self.seat: Seat | None = None
        #: Last incarnation of a copier that the client has confirmed.
        self.copier_seen: int | None = None
        self.closed = False
        self.close_reason = ""
        #: Set at the session's end, for calls that wait.
        self.ended = asyncio.Event()

    def is_dead(self) -> bool:
        """True once the process has ended, also before its connection tells."""
        if self.closed:
            return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close_memories(self) -> None:
        """Let go of the memories; only when no copier can need them any more."""
        for memory in self.memories.values():
            os.close(memory.fd)
        self.memories.clear()


class Sessions:
    """All open sessions, by token."""

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self._sessions: dict[str, Session] = {}
        #: Called with each session that has ended, before its link is closed.
        self.closed: list[Callable[[Session], None]] = []
        self.draining = False

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, role: Role, peer: Peer, pidfd: int, link: Link) -> Session:
        """A new session; the link keeps the pidfd and closes it after the session's end.

        Raises:
            Draining: the daemon is about to exit.
            Overloaded: there are sessions_max already.
        """
        if self.draining:
            raise Draining("The daemon is draining and takes no new session.")
        if len(self._sessions) >= self._options.sessions_max:
            raise Overloaded(
                f"There are {len(self._sessions)} sessions, as many as sessions_max allows."
            )
        session = Session(secrets.token_hex(16), role, peer, pidfd, link)
        self._sessions[session.token] = session
        return session

    def get(self, token: str) -> Session:
        """Raises SessionNotFound."""
        session = self._sessions.get(token)
        if session is None:
            raise SessionNotFound("The session token is unknown, or its session has ended.")
        return session

    def add_memory(self, session: Session, memory: Memory) -> None:
        """Take an offered memory in. On a failure the descriptor stays the caller's.

        Raises:
            ProtocolMismatch: the index is taken or too high, or the session has registered.
        """
        if session.registering or session.instance is not None:
            raise ProtocolMismatch("Memory must be offered before the session registers.")
        if memory.memory_index >= self._options.memories_max:
            raise ProtocolMismatch(
                f"Memory index {memory.memory_index} is not below the session's limit of "
                f"{self._options.memories_max}."
            )
        if memory.memory_index in session.memories:
            raise ProtocolMismatch(f"Memory {memory.memory_index} was offered before.")
        session.memories[memory.memory_index] = memory

    def close(self, session: Session, code: CloseCode | None, reason: str) -> None:
        """End a session; a second end is ignored."""
        if session.closed:
            return
        session.closed = True
        session.close_reason = reason
        session.ended.set()
        del self._sessions[session.token]
        with ExitStack() as ending:
            # Last in, first out: the memories go last. A step that fails, by a fault of ours,
            # is raised after the others were taken.
            if session.seat is None:
                ending.callback(session.close_memories)
            ending.callback(session.link.close, code, reason)
            for listener in reversed(self.closed):
                ending.callback(listener, session)

    def close_all(self, code: CloseCode, reason: str) -> None:
        """End all sessions."""
        for session in tuple(self._sessions.values()):
            self.close(session, code, reason)

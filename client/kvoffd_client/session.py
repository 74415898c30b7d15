"""What all sessions share: a connection that comes back by itself.

A session runs as one task on the background loop: handshake, registration,
heartbeats, and again with back-off when any of them ends. Its attributes are
written by that loop alone; an engine thread reads them, one at a time. Nothing
here raises into an engine thread or waits on one, `close` and `wait_until`
apart, and those are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvoffd_client import io_thread
from kvoffd_client.channel import Metadata, open_channel, session_metadata
from kvoffd_client.errors import (
    ClientError,
    SessionClosed,
)
from kvoffd_client.handshake import Handshake, OfferedMemory, WelcomeFacts
from kvoffd_client.messages import register_request
from kvoffd_client.paths import handshake_path
from kvoffd_client.ports import Limits, SessionState
from kvoffd_client.reconnect import Backoff, explain, judge
from kvoffd_client.tasks import TEARDOWN_S, cancel_all, race
from kvoffd_proto.v1 import handshake_pb2, offload_pb2, offload_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvoffd_client.descriptions import EngineIdentity, SessionOptions

logger = logging.getLogger(__name__)

# Until all ranks are there stores are vain, so that is asked for more often.
_HEARTBEAT_INCOMPLETE_S = 0.1


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """A reading for logs and metrics."""

    state: SessionState
    reason: str  # why it is not up; empty when it is
    attempts: int
    connects: int
    outages: int


@dataclass(frozen=True, slots=True)
class Connection:
    """One life of a session: valid from welcome to loss."""

    handshake: Handshake
    facts: WelcomeFacts
    stub: offload_pb2_grpc.OffloadStub
    metadata: Metadata


class Session:
    """Base of the two kinds of session; see there. Make it, then `start` it after any fork."""

    def __init__(self, options: SessionOptions, engine: EngineIdentity) -> None:
        self._options = options
        self._engine = engine
        self._pid = os.getpid()
        self._io: io_thread.IoThread | None = None
        self._state = SessionState.ABSENT
        self._reason = "not started"
        self._limits: Limits | None = None
        self._attempts = 0
        self._connects = 0
        self._outages = 0
        self._generation = 0
        self._instance_complete = False
        self._state_changed = threading.Condition()
        self._closing = asyncio.Event()
        self._close_timeout_s = 0.0
        self._attempt: asyncio.Task[ClientError | None] | None = None
        self._ended = threading.Event()
        self._backoff = Backoff(options)
        self._was_up = False
        self._told: set[str] = set()

    # --- for the engine's threads ---------------------------------------------------

    def start(self) -> None:
        """Begin to connect, in the background. Once; a session of before a fork stays closed."""
        if self._io is not None or self._is_inherited() or self._state is SessionState.CLOSED:
            return
        if io_thread.is_fork_of_a_user():
            sentence = "this process was forked from one that already had a session"
            logger.warning("kvoffd: %s, so it goes on without one", sentence)
            self._enter(SessionState.CLOSED, sentence)
            return
        self._enter(SessionState.CONNECTING, "not tried yet")
        self._io = io_thread.shared()
        self._io.keep_until_exit(self)
        self._io.spawn(self._run)

    @property
    def state(self) -> SessionState:
        return SessionState.CLOSED if self._is_inherited() else self._state

    @property
    def limits(self) -> Limits | None:
        return self._limits

    @property
    def instance_complete(self) -> bool:
        return self._instance_complete and self._state is SessionState.UP

    @property
    def status(self) -> SessionStatus:
        return SessionStatus(
            self.state, self._reason, self._attempts, self._connects, self._outages
        )

    def wait_until(self, state: SessionState, timeout_s: float) -> bool:
        """Wait for a state, bounded; for start-up and tests, never within a step."""
        if self._is_inherited():
            return state is SessionState.CLOSED
        with self._state_changed:
            return self._state_changed.wait_for(lambda: self._state is state, timeout_s)

    def wait_for_first_attempt(self, timeout_s: float) -> bool:
        """Wait until the attempt under way has succeeded or failed; True when it is up.

        For an engine's start: a daemon that is not there is known at once, and one that is
        there answers before the first request does, however busy the machine is.
        """
        if self._is_inherited():
            return False
        with self._state_changed:
            self._state_changed.wait_for(
                lambda: self._state is not SessionState.CONNECTING, timeout_s
            )
            return self._state is SessionState.UP

    def close(self, timeout_s: float = 1.0) -> None:
        """End the session within the bound: what is left is sent, then goodbye is said."""
        done = self.start_close(timeout_s)
        if self._io is None or not self._io.runs_here():
            done.wait(timeout_s)

    def start_close(self, timeout_s: float) -> threading.Event:
        """Begin to close; the event is set when it is done, within about `timeout_s`."""
        if self._is_inherited():
            done = threading.Event()
            done.set()
            return done
        if self._io is None or not self._io.submit(lambda: self._close_soon(timeout_s)):
            self._enter(SessionState.CLOSED, "closed")
            self._ended.set()
        return self._ended

    def _is_inherited(self) -> bool:
        """Whether this is a forked child's copy: its thread and its locks are elsewhere."""
        return os.getpid() != self._pid

    # --- for subclasses, on the loop -------------------------------------------------

    _role: handshake_pb2.SessionRole

    def _memories(self) -> Sequence[OfferedMemory]:
        return ()

    def _register_request(self) -> offload_pb2.RegisterRequest:
        return register_request(self._engine)

    async def _open(self, connection: Connection) -> None:
        """Open what else the session needs before it is up."""
        raise NotImplementedError

    def _works(self, connection: Connection) -> list[Coroutine[Any, Any, None]]:
        """What runs while it is up. The end of any of them is the end of the connection."""
        raise NotImplementedError

    def _went_up(self, connection: Connection) -> None:
        """Take work from now on. Must not wait."""
        raise NotImplementedError

    def _went_down(self) -> None:
        """Answer all that is open, take nothing new. Must not wait; may come twice."""
        raise NotImplementedError

    async def _settle(self) -> None:
        """Take nothing new, wait for answers that would be lost. Cut off after a bound."""
        raise NotImplementedError

    async def _leave(self) -> None:
        """Write what is left and the stream's end. The works still run; cut off, too."""
        raise NotImplementedError

    def _heard(self, connection: Connection) -> None:
        """A heartbeat was answered. Must not wait."""

    # --- the session's life, on the loop ---------------------------------------------

    def _close_soon(self, timeout_s: float) -> None:
        self._close_timeout_s = timeout_s
        self._closing.set()
        if self._state is not SessionState.UP and self._attempt is not None:
            self._attempt.cancel()

    async def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._enter(SessionState.CONNECTING, self._reason)
                await self._try_once()
        finally:
            self._fall()
            self._enter(SessionState.CLOSED, "closed")
            if self._io is not None:
                self._io.let_go(self)
            self._ended.set()

    async def _try_once(self) -> None:
        """Live one connection from its first to its last moment, then pause."""
        self._attempts += 1
        attempt = self._attempt = asyncio.create_task(self._live())
        await asyncio.wait([attempt])
        self._attempt = None
        if self._closing.is_set() or attempt.cancelled():
            return
        failure = attempt.result() or SessionClosed("the connection ended")
        pause_s = self._note_failure(failure)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), pause_s)

    async def _live(self) -> ClientError | None:
        """Connect and serve. The reason of the end is the answer, never an exception."""
        try:
            handshake = await Handshake.open(
                handshake_path(self._options.socket_path),
                self._role,
                self._memories(),
                self._options.handshake_timeout_s,
            )
            try:
                await self._serve_channel(handshake)
            finally:
                handshake.close()
        except ClientError as error:
            return _bare(error)
        except grpc.aio.AioRpcError as error:
            return explain(error)
        except Exception as error:
            logger.exception("kvoffd: an internal error ended a session")
            return SessionClosed(f"internal error: {error!r}")
        finally:
            self._fall()
        return None

    async def _serve_channel(self, handshake: Handshake) -> None:
        assert handshake.facts is not None, "an open handshake has facts"
        self._limits = handshake.facts.limits
        channel = open_channel(self._options.socket_path)
        try:
            connection = Connection(
                handshake,
                handshake.facts,
                offload_pb2_grpc.OffloadStub(channel),
                session_metadata(handshake.facts.token),
            )
            await self._serve(connection)
        finally:
            self._fall()
            closing = asyncio.ensure_future(channel.close())
            await asyncio.wait([closing], timeout=TEARDOWN_S)

    async def _serve(self, connection: Connection) -> None:
        await race(self._register(connection), connection.handshake.ended)
        works = [asyncio.create_task(self._beat(connection))]
        works.extend(asyncio.create_task(work) for work in self._works(connection))
        closing = asyncio.create_task(self._closing.wait())
        try:
            self._now_up(connection)
            ends: list[asyncio.Future[Any]] = [*works, closing, connection.handshake.ended]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await self._say_goodbye(connection, works)
                return
            # The handshake's word explains the most, then the first work that ended.
            for end in (connection.handshake.ended, *works):
                if end.done():
                    end.result()
                    raise SessionClosed("the daemon ended the stream")
        finally:
            self._fall()
            if self._state is SessionState.UP and not self._closing.is_set():
                # The reason follows when the teardown is through.
                self._enter(SessionState.LOST, "the connection ended")
            await cancel_all([*works, closing])

    async def _register(self, connection: Connection) -> None:
        try:
            response = await connection.stub.Register(
                self._register_request(),
                metadata=connection.metadata,
                timeout=self._options.register_timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            raise explain(error, refusals=True) from error
        self._generation = response.generation
        self._instance_complete = False
        try:
            async with asyncio.timeout(self._options.handshake_timeout_s):
                await self._open(connection)
        except TimeoutError:
            raise SessionClosed("the daemon did not open the stream in time") from None

    async def _say_goodbye(
        self, connection: Connection, works: Sequence[asyncio.Task[None]]
    ) -> None:
        # A part of the bound is left for taking the connection down.
        for act, part in ((self._settle, 0.6), (self._leave, 0.2)):
            task = asyncio.create_task(act())
            ends = [task, connection.handshake.ended, *works]
            await asyncio.wait(
                ends, timeout=self._close_timeout_s * part, return_when=asyncio.FIRST_COMPLETED
            )
            await cancel_all([task])
        connection.handshake.goodbye("closed by the engine")

    async def _beat(self, connection: Connection) -> None:
        heartbeat_s = connection.facts.limits.heartbeat_s
        timeout_s = self._options.heartbeat_timeout_s or max(3 * heartbeat_s, 10.0)
        request = offload_pb2.HeartbeatRequest()
        while True:
            reply = await connection.stub.Heartbeat(
                request, metadata=connection.metadata, timeout=timeout_s
            )
            if reply.boot_id != connection.facts.boot_id:
                raise SessionClosed("another daemon answers at the socket")
            # A reply may have left before a reset that is confirmed by now.
            self._generation = max(self._generation, reply.generation)
            self._instance_complete = reply.instance_complete
            self._heard(connection)
            pause_s = heartbeat_s
            if not reply.instance_complete:
                pause_s = min(heartbeat_s, _HEARTBEAT_INCOMPLETE_S)
            await asyncio.sleep(pause_s)

    def _fall(self) -> None:
        """Answer what is open. A fault in that must not keep the connection, or its end, open."""
        try:
            self._went_down()
        except Exception:
            logger.exception("kvoffd: an internal error in ending a session's work")

    # --- states and what is said of them ---------------------------------------------

    def _now_up(self, connection: Connection) -> None:
        self._connects += 1
        self._was_up = True
        self._backoff.went_up()
        self._went_up(connection)
        self._enter(SessionState.UP, "")
        if self._told:
            logger.info("kvoffd: connected to %s after all", self._options.socket_path)
            self._told.clear()

    def _note_failure(self, failure: ClientError) -> float:
        """Change the state, say once what is the matter, and tell how long to pause."""
        sentence = str(failure)
        was_up, self._was_up = self._was_up, False
        refused, pause_s = self._backoff.failed(failure, was_up=was_up)
        if was_up:
            self._outages += 1
        state, said = judge(
            self._options.socket_path, refused=refused, was_ever_up=self._connects > 0
        )
        # Said before it shows, so that who sees the state finds the reason in the log.
        key = f"refused {getattr(failure, 'code', None)}" if refused else "outage"
        if key not in self._told:
            self._told.add(key)
            logger.warning("kvoffd: %s: %s", said, sentence)
        self._enter(state, sentence)
        return pause_s

    def _enter(self, state: SessionState, reason: str) -> None:
        with self._state_changed:
            self._state = state
            self._reason = reason
            self._state_changed.notify_all()


def _bare(error: ClientError) -> ClientError:
    """The failure without its frames: they hold the channel, which holds its socket open."""
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error

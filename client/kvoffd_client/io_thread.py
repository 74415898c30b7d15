"""The one background thread of a process: an asyncio loop that all sessions share.

Owns the thread and its loop. Engine threads only ever call `submit`, which
takes microseconds and never waits. Started when first asked for; a forked child
gets a new one and leaves the parent's loop, which still holds shared kernel
objects, alone. At the interpreter's exit sessions are closed within a bound and
the thread is joined, so that nothing runs while the interpreter is taken apart.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

# All sessions of the process say goodbye at once within this time.
_EXIT_CLOSE_S = 2.0
_EXIT_JOIN_S = 2.0


class Closable(Protocol):
    """Something that the exit of the interpreter must close first."""

    def start_close(self, timeout_s: float) -> threading.Event:
        """Begin to close; the event is set within about `timeout_s`."""


class IoThread:
    """A daemon thread with a running loop. Make none: ask `shared()`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_loop_error)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Closable] = set()
        self._is_stopping = False
        self._itself: IoThread | None = None
        self._thread = threading.Thread(target=self._run, name="kvoffd-io", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, callback: Callable[[], None]) -> bool:
        """Have the loop call back soon; False when the thread has ended. Never waits."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: the interpreter exits
            return False
        return True

    def spawn(self, make: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run a coroutine as a task of its own on the loop; False when the thread has ended."""
        return self.submit(lambda: self._start_task(make))

    def _start_task(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(make())
        # The loop itself keeps only weak references.
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)

    def runs_here(self) -> bool:
        """Whether the caller is on this thread, where waiting for it would never end."""
        return threading.get_ident() == self._thread.ident

    def keep_until_exit(self, session: Closable) -> None:
        """Have the session closed when the interpreter exits, unless it is let go before."""
        self._open.add(session)

    def let_go(self, session: Closable) -> None:
        self._open.discard(session)

    def outlive_the_interpreter(self) -> None:
        """Never be freed, in a forked child: to close the loop would disturb the parent's epoll."""
        self._itself = self

    def stop(self) -> None:
        """Close what is open, cancel what runs, join the thread; bounded. For the exit."""
        if self._is_stopping:
            return
        self._is_stopping = True
        deadline_s = time.monotonic() + _EXIT_CLOSE_S + 0.5
        closings = [session.start_close(_EXIT_CLOSE_S) for session in list(self._open)]
        for closing in closings:
            closing.wait(max(deadline_s - time.monotonic(), 0.0))
        self.spawn(self._cancel_and_stop)
        self._thread.join(_EXIT_JOIN_S)

    async def _cancel_and_stop(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_EXIT_JOIN_S / 2)
        self._loop.stop()


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Keep a known harmless complaint quiet: two loops of gRPC race for one wake-up."""
    if isinstance(context.get("exception"), BlockingIOError):
        logger.debug("gRPC's wake-up was taken by another loop")
        return
    loop.default_exception_handler(context)


class _Shared:
    """The process's thread, and what a fork left behind."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: IoThread | None = None
        self.inherited: list[IoThread] = []


_shared = _Shared()


def shared() -> IoThread:
    """The background thread of this process, started if need be."""
    with _shared.lock:
        if _shared.thread is None:
            _shared.thread = IoThread()
        return _shared.thread


def is_fork_of_a_user() -> bool:
    """Whether this process was forked from one in which the thread ran.

    Then gRPC ran there, too, and it does not work in such a child: its threads
    are missing, and a call would never end.
    """
    return bool(_shared.inherited)


def _forget_in_child() -> None:
    if _shared.thread is not None:
        # gRPC's objects and the lost thread's frames must never be collected here: the
        # threads and locks that they rely on do not exist in the child, and it would crash.
        gc.freeze()
        _shared.thread.outlive_the_interpreter()
        _shared.inherited.append(_shared.thread)
        _shared.thread = None
    # The lock may have been held by a thread that does not exist here.
    _shared.lock = threading.Lock()


def _stop_at_exit() -> None:
    thread = _shared.thread
    if thread is not None:
        thread.stop()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop_at_exit)

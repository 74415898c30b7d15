"""One copier process as the control process sees it: spawn, frames, death.

Owns the process, its pidfd, our end of the socketpair and the frames that wait
for room in it. Runs on the loop thread, which must be the main thread: the
kernel kills a copier when the thread that spawned it ends. Decides nothing:
whether to restart is the supervisor's.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from kvoffd.copier import frames
from kvoffd.errors import CopyFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: glibc uses non-temporal stores only for copies of many MiB, so each piece of
#: a shard would first be read by its destination's cache: 0.6 of the bandwidth.
#: Read by libc before the process starts, hence set here. Lower values have no effect.
_GLIBC_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=32768"
#: Frames read in one turn of the loop; more would starve the RPCs beside us.
_FRAMES_A_TURN_MAX = 64
#: From the end of its connection to SIGKILL: unmapping takes 60 ms a GiB.
_EXIT_TIMEOUT_S = 5.0


class Child:
    """A running copier. `died` is set with a sentence once the process is gone for good."""

    def __init__(
        self,
        device: str,
        arena_fd: int,
        arena_bytes: int,
        environment: Mapping[str, str],
        on_frame: Callable[[frames.FromCopier], None],
    ) -> None:
        """Spawn the process. It will say Hello.

        Raises:
            OSError: no process, or no descriptors, to be had.
        """
        self._loop = asyncio.get_running_loop()
        self._device = device
        self._on_frame = on_frame
        self._outbox: collections.deque[tuple[bytes, Sequence[int]]] = collections.deque()
        self._kill_reason: str | None = None
        self._last_call: asyncio.TimerHandle | None = None
        self.died: asyncio.Future[str] = self._loop.create_future()
        #: Names this process in ticket cells, also to clients that outlive this daemon.
        self.incarnation = secrets.randbits(63) | 1
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self._socket.close)
            self._socket.setblocking(False)  # noqa: FBT003 - the standard library's signature
            self._process = self._spawn(theirs.fileno(), arena_fd, arena_bytes, environment)
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self._loop.add_reader(self._socket, self._read)
        self._loop.add_reader(self.pidfd, self._buried)

    @property
    def pid(self) -> int:
        """Process id; certain to be this process only until `died` is set."""
        return self._process.pid

    @property
    def is_condemned(self) -> bool:
        """It has been killed, though it may not be dead yet."""
        return self._kill_reason is not None

    def send(self, frame: frames.ToCopier, fds: Sequence[int] = ()) -> None:
        """Send a frame, now or when the socket has room. Never blocks.

        The descriptors must stay open until the copier has answered or is dead.
        To a dead copier nothing is sent: its death answers everything.
        """
        if self.died.done() or self._socket.fileno() < 0:
            return
        self._outbox.append((frames.encode_frame(frame), fds))
        if len(self._outbox) == 1:
            self._write()

    def kill(self, reason: str) -> None:
        """SIGKILL. `died` follows when the kernel has torn the process down."""
        if not self.died.done():
            self._kill_reason = self._kill_reason or reason
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def hang_up(self) -> None:
        """Close our end: the copier exits by itself as soon as it notices."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._outbox.clear()

    def close_pidfd(self) -> None:
        """Last act: nobody may be about to dup it."""
        assert self.died.done(), "The pidfd of a live copier was to be closed."
        os.close(self.pidfd)

    def end_now(self) -> None:
        """Kill, and wait in place. For a loop that is being torn down under us."""
        if not self.died.done():
            self.kill("torn down")
            self._process.wait()
            self._buried()

    def _spawn(
        self, socket_fd: int, arena_fd: int, arena_bytes: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [
                sys.executable,
                "-P",
                "-m",
                "kvoffd.copier.process",
                self._device,
                f"--socket-fd={socket_fd}",
                f"--arena-fd={arena_fd}",
                f"--arena-bytes={arena_bytes}",
                f"--incarnation={self.incarnation}",
                f"--parent-pid={os.getpid()}",
            ],
            env={
                # The same packages as ours, wherever they were found.
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                **environment,
                "GLIBC_TUNABLES": _GLIBC_TUNABLES,
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            pass_fds=(socket_fd, arena_fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def _write(self) -> None:
        while self._outbox:
            encoded, fds = self._outbox[0]
            try:
                frames.send_encoded(self._socket, encoded, fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._write)
                return
            except OSError:
                # The end of the connection is waiting to be read, perhaps behind frames.
                self._outbox.clear()
                break
            self._outbox.popleft()
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        for _ in range(_FRAMES_A_TURN_MAX):
            if not self._read_one():
                return

    def _read_one(self) -> bool:
        """Hand one frame on. False when there is none now, or never again."""
        if self._socket.fileno() < 0:
            return False
        try:
            frame = frames.receive_from_copier(self._socket)
        except BlockingIOError:
            return False
        except (OSError, CopyFailed, msgspec.MsgspecError) as error:
            self.hang_up()
            self.kill(f"cannot be understood: {error}")
            return False
        if frame is None:
            # It is ending, and its exit code is worth waiting for. A process that lives on
            # without a connection is of no use.
            self.hang_up()
            self._last_call = self._loop.call_later(
                _EXIT_TIMEOUT_S, self.kill, "closed its connection"
            )
            return False
        self._on_frame(frame)
        return True

    def _buried(self) -> None:
        """The pidfd is readable: the process is gone, and with it every mapping of it."""
        self._loop.remove_reader(self.pidfd)
        code = self._process.wait()
        # What it said before it died is true: those copies have ended.
        while self._read_one():
            pass
        self.hang_up()
        if self._last_call is not None:
            self._last_call.cancel()
        if not self.died.done():
            self.died.set_result(self._sentence(code))

    def _sentence(self, code: int) -> str:
        ending = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        because = f" ({self._kill_reason})" if self._kill_reason else ""
        return f"The copier of {self._device} {ending}{because}."

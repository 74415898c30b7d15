"""One daemon a socket: the lock beside it, and what a dead daemon has left there.

Owns the lock's descriptor. The kernel drops the lock with the process, so that a file
without one is known to be stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffd.errors import KvoffdError, SocketTaken

if TYPE_CHECKING:
    from kvoffd.rpc.options import RpcOptions


class SocketLock:
    """Held from before the sockets are made until after they are removed."""

    def __init__(self, options: RpcOptions) -> None:
        self._options = options
        self._fd: int | None = None

    def take(self) -> None:
        """Lock the place and clear it of a dead daemon's sockets.

        Raises:
            SocketTaken: a live daemon has it, or a file that is no socket is in the way.
            OSError: the lock file cannot be made.
        """
        fd = os.open(self._options.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SocketTaken(
                    f"Another daemon serves {self._options.socket}; it holds "
                    f"{self._options.lock_file}."
                ) from None
            for path in (self._options.socket, self._options.handshake_socket):
                _remove_stale(path)
        except (KvoffdError, OSError):
            os.close(fd)
            raise
        self._fd = fd

    def drop(self) -> None:
        """Let go of the place. The lock file stays: removing it would let two daemons in."""
        if self._fd is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(self._options.socket).unlink()
            os.close(self._fd)
            self._fd = None


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketTaken(f"{path} is there and is no socket; it is not ours to remove.")
    Path(path).unlink()

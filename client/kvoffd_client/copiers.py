"""Pidfds of the copiers that served one handshake connection, by incarnation.

Written by the background loop, asked by an engine thread; a descriptor is
closed when nobody can ask for it any more. A readable pidfd is the kernel's
word that the process is gone with all its mappings.
"""

from __future__ import annotations

import os
import select
import weakref


class CopierBook:
    """What one connection was told of copiers; outlives it as long as a load may ask."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._pidfds, os.getpid())

    def add(self, incarnation: int, pidfd: int) -> None:
        """Take the pidfd over; it is closed with the book. One told twice is kept once."""
        former = self._pidfds.get(incarnation)
        if former is not None:
            os.close(pidfd)
            return
        self._pidfds[incarnation] = pidfd

    def knows(self, incarnation: int) -> bool:
        return incarnation in self._pidfds

    def is_gone(self, incarnation: int) -> bool:
        """True when that process has ended for certain; microseconds."""
        pidfd = self._pidfds.get(incarnation)
        if pidfd is None:
            return False
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        # Anything but a plain "readable" (a bad descriptor, say) proves nothing.
        return any(events & select.POLLIN for _, events in poll.poll(0))


def _close_all(pidfds: dict[int, int], owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return
    for pidfd in pidfds.values():
        os.close(pidfd)
    pidfds.clear()

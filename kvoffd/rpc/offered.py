"""Offered: is a descriptor that came over the handshake socket what it must be?

Pure but for the system calls that look at a descriptor; blocks nowhere. A memory that
passes cannot shrink under a copier, is the caller's own, and is as large as he says.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kvoffd.errors import MemoryRefused

#: Since Linux 5.1; fcntl knows it from Python 3.14 on.
F_SEAL_FUTURE_WRITE = 0x10


def check_memory(fd: int, size_bytes: int, size_bytes_max: int, uid: int) -> None:
    """Raises MemoryRefused with a sentence."""
    if not 0 < size_bytes <= size_bytes_max:
        raise MemoryRefused(
            f"A memory of {size_bytes} bytes was offered; from 1 to {size_bytes_max} is allowed."
        )
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise MemoryRefused("The descriptor offered is no memfd.")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise MemoryRefused("The descriptor offered is no memfd.") from None
    if found.st_uid != uid:
        raise MemoryRefused(f"The memory offered belongs to user {found.st_uid}, not to {uid}.")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise MemoryRefused("The memory offered is not sealed against shrinking (F_SEAL_SHRINK).")
    if seals & (fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
        raise MemoryRefused("The memory offered is sealed against writing; loads write to it.")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise MemoryRefused("The memory offered is not open for reading and writing.")
    if found.st_size < size_bytes:
        raise MemoryRefused(
            f"A memory of {size_bytes} bytes was offered; the descriptor has {found.st_size}."
        )


def is_pidfd_of(fd: int, pid: int) -> bool:
    """True if the descriptor is a pidfd of that process, which may have ended."""
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    except OSError:
        return False
    return f"Pid:\t{pid}" in text.splitlines()

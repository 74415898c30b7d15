"""Mapping of shared memory that a peer has offered.

Runs in a copier. The checks make sure that no peer can shrink a mapping under
us: a touch beyond the end would be SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

from kvoffd.errors import MemoryRefused


def map_shared(fd: int, size_bytes: int, what: str) -> mmap.mmap:
    """Map the first size_bytes of a sealed memfd, to read and to write.

    The mapping keeps the memory; the descriptor stays the caller's. `what` names
    it in the sentence.

    Raises:
        MemoryRefused: not a memfd, not sealed against shrinking, or too small.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise MemoryRefused(f"{what} is not a memfd.")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise MemoryRefused(f"{what} is not a memfd: it has no seals.") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise MemoryRefused(f"{what} is not sealed against shrinking.")
    # Only after the seal is seen: before it, the size could change behind us.
    if os.fstat(fd).st_size < size_bytes:
        raise MemoryRefused(
            f"{what} has {status.st_size} bytes, but {size_bytes} bytes were described."
        )
    try:
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise MemoryRefused(f"{what} cannot be mapped: {error}") from error

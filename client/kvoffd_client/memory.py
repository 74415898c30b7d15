"""Shared memory that a copier dares to map: memfds that cannot shrink.

Owns descriptors and mappings made here. May be used on any thread, by one at
a time. Nothing has a name in the file system, so nothing stays after a crash.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from kvoffd_client.errors import MemoryFailed

# Linux 6.3. Without it the kernel may log a complaint, or be set to refuse.
_MFD_NOEXEC_SEAL = 0x8


class SharedMemory:
    """One sealed memfd. `buffer` maps it on first use; the descriptor alone is often enough."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._buffer: mmap.mmap | None = None
        self._is_open = True

    @classmethod
    def create(cls, name: str, size_bytes: int) -> SharedMemory:
        """Make zeroed memory, sealed against shrinking and growing.

        Raises:
            MemoryFailed: The kernel gives none. Nothing is left open.
        """
        if size_bytes <= 0:
            raise MemoryFailed(f"shared memory needs a positive size, not {size_bytes} bytes")
        try:
            fd = _open_memfd(name)
        except OSError as error:
            raise MemoryFailed(f"no shared memory for {name}: {error.strerror}") from error
        try:
            # A memfd is born readable by all who reach it through /proc.
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise MemoryFailed(
                f"no shared memory of {size_bytes} bytes for {name}: {error}"
            ) from error
        return cls(fd, size_bytes)

    @property
    def buffer(self) -> mmap.mmap:
        if self._buffer is None:
            self._buffer = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED)
        return self._buffer

    def close(self) -> None:
        """Unmap and close; views of the buffer must be gone. Who mapped it keeps it."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self._is_open:
            self._is_open = False
            os.close(self.fd)


def _open_memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)

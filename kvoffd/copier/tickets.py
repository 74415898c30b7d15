"""A client's ticket page as a copier sees it: proof of who may still write.

Owns the mapping of one page and the descriptor that its record locks are taken
on. Runs in a copier, on its only thread: a process's record locks on a file
all fall when it closes any descriptor of that file, so a lock is never held
while anything else is done than one load.

Layout, little-endian aligned words: header {0: magic u64, 8: version u32,
12: cells u32, 64: doorbell u64}; cell i at 4096 + 64 * i {+0: job id u64, +8:
revoked u64, +16: state u64, +24: incarnation u64}; cell i's lock is the byte
at the cell's own offset. Bytes are copied before the cell is read: this leans
on a machine that does not reorder loads, as x86-64.
"""

from __future__ import annotations

import fcntl
import os

from kvoffd.devices.memory import map_shared
from kvoffd.errors import MemoryRefused

TICKET_MAGIC = int.from_bytes(b"KVOFTKT1", "little")
TICKET_VERSION = 1
HEADER_BYTES = 4096
CELL_BYTES = 64
#: 64 MiB of cells: far more jobs than a rank has in flight.
TICKET_CELLS_MAX = 1 << 20

STATE_UNTOUCHED = 0
STATE_STARTED = 1
STATE_DONE = 2
#: Given up: nothing has been written, or nothing will be any more.
STATE_GIVEN_UP = 3

_WORD_BYTES = 8
_DOORBELL_WORD = 64 // _WORD_BYTES
_JOB, _REVOKED, _STATE, _INCARNATION = range(4)


class TicketPage:
    """One rank's page."""

    def __init__(self, fd: int, cells: int) -> None:
        """Map the page; the descriptor stays the caller's.

        Raises:
            MemoryRefused: not a sealed memfd, too small, or not a ticket page.
        """
        if not 0 < cells <= TICKET_CELLS_MAX:
            raise MemoryRefused(f"A ticket page cannot have {cells} cells.")
        self.cells = cells
        self._mapping = map_shared(fd, HEADER_BYTES + CELL_BYTES * cells, "The ticket page")
        self._words = memoryview(self._mapping).cast("Q")
        found = (self._words[0], self._words[1])
        if found != (TICKET_MAGIC, TICKET_VERSION | cells << 32):
            self._words.release()
            self._mapping.close()
            raise MemoryRefused(
                f"The ticket page does not say that it is version {TICKET_VERSION} "
                f"with {cells} cells."
            )
        self._fd = os.dup(fd)

    def close(self) -> None:
        """Unmap it. No lock may be held."""
        self._words.release()
        self._mapping.close()
        os.close(self._fd)

    @property
    def doorbell(self) -> int:
        """How far the engine's device work has come."""
        return self._words[_DOORBELL_WORD]

    def is_live(self, cell: int, job_id: int) -> bool:
        """Whether the cell is this job's and not revoked."""
        word = self._word(cell)
        # In this order: revoked is cleared before the cell gets another job's id,
        # so the other way round a fence and a new job between the two reads
        # would look like neither.
        return self._words[word + _REVOKED] == 0 and self._words[word + _JOB] == job_id

    def try_lock(self, cell: int) -> bool:
        """Take the cell's lock. False when the client has it, which is for a moment."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_byte(cell))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, cell: int) -> None:
        """Give the cell's lock back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _lock_byte(cell))

    def begin(self, cell: int, incarnation: int) -> None:
        """Say that this process may write from now on. The lock must be held."""
        word = self._word(cell)
        self._words[word + _INCARNATION] = incarnation
        self._words[word + _STATE] = STATE_STARTED

    def finish(self, cell: int) -> None:
        """Say that all bytes have arrived. The lock must be held."""
        self._words[self._word(cell) + _STATE] = STATE_DONE

    def give_up(self, cell: int, job_id: int) -> None:
        """Say that no bytes will follow, if the cell is still this job's. Under the lock."""
        word = self._word(cell)
        if self._words[word + _JOB] == job_id:
            self._words[word + _STATE] = STATE_GIVEN_UP

    def _word(self, cell: int) -> int:
        assert 0 <= cell < self.cells, f"Cell {cell} of a page with {self.cells}."
        return _lock_byte(cell) // _WORD_BYTES


def _lock_byte(cell: int) -> int:
    return HEADER_BYTES + CELL_BYTES * cell

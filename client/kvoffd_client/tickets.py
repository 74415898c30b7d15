"""The ticket page: a rank's proof that a job can no longer touch its blocks.

Owned by one rank, on one engine thread; the copier maps the same memory. Nothing
here waits: words are written in place, and the one lock is only ever tried.

Format, little-endian 64-bit words. Header of 4096 bytes: magic, version and
cell count (32 bits each), and the doorbell at byte 64. Then a cell of 64 bytes
for each job: job id, revoked, state, incarnation of the copier that started it.
A cell is taken by writing its job id last and given up by clearing it first, so
a copier never sees a job's id beside another job's words.

Order of stores: every word is written by one aligned 64-bit store; x86 keeps
their order, and taking the record lock is a system call, which orders the
copier's words before what is read here.
"""

from __future__ import annotations

import enum
import fcntl
import sys
from collections import deque

from kvoffd_client.memory import SharedMemory

MAGIC = int.from_bytes(b"KVOFTKT1", "little")
VERSION = 1
HEADER_BYTES = 4096
CELL_BYTES = 64
_WORD_BYTES = 8
_DOORBELL_WORD = 64 // _WORD_BYTES
_CELLS_WORD0 = HEADER_BYTES // _WORD_BYTES
_CELL_WORDS = CELL_BYTES // _WORD_BYTES
_REVOKED, _STATE, _INCARNATION = 1, 2, 3

_UNTOUCHED, _STARTED, _DONE, _GIVEN_UP = 0, 1, 2, 3


class LoadProof(enum.Enum):
    """What the page proves of a load that was asked to end."""

    LOADED = "loaded"  # all bytes are in place, and no write will follow
    UNTOUCHED = "untouched"  # nothing was written, and nothing ever will be
    GIVEN_UP = "given_up"  # the copier ended it badly; no write will follow
    INTERRUPTED = "interrupted"  # started, not ended, not locked: proven once that copier is gone
    RUNNING = "running"  # a copier holds the lock: not proven, ask again

    @property
    def is_final(self) -> bool:
        """Whether no write will follow, so that the load can be reported."""
        return self not in {LoadProof.INTERRUPTED, LoadProof.RUNNING}


class TicketPage:
    """A page of cells, one for each job in flight, and the doorbell."""

    def __init__(self, memory: SharedMemory, cells: int) -> None:
        assert sys.byteorder == "little", "the page is read in place by a little-endian peer"
        self.memory = memory
        self.cells = cells
        self._words = memoryview(memory.buffer).cast("Q")
        self._words[1] = cells << 32 | VERSION
        self._words[0] = MAGIC
        # First in, first out: a cell rests as long as possible before it is used again.
        self._free = deque(range(cells))
        self._taken = bytearray(cells)

    @classmethod
    def create(cls, cells: int) -> TicketPage:
        """Make a page of `cells` free cells in sealed memory of its own.

        Raises:
            MemoryFailed: The kernel gives none.
        """
        assert cells > 0, "a page needs cells"
        memory = SharedMemory.create("kvoffd-tickets", HEADER_BYTES + CELL_BYTES * cells)
        return cls(memory, cells)

    @property
    def cells_free(self) -> int:
        return len(self._free)

    def allocate(self, job_id: int) -> int | None:
        """Take a cell for a job; None when all are taken. Undone by `free`."""
        assert job_id > 0, "job ids count from 1"
        if not self._free:
            return None
        cell = self._free.popleft()
        self._taken[cell] = 1
        word = self._first_word(cell)
        words = self._words
        words[word + _REVOKED] = 0
        words[word + _STATE] = _UNTOUCHED
        words[word + _INCARNATION] = 0
        words[word] = job_id
        return cell

    def free(self, cell: int) -> None:
        """Give a cell back: a store's when its job has ended, a load's only with a final proof.

        To a copier that still works on a store of this cell the job is revoked.
        """
        assert self._taken[cell], f"cell {cell} is not taken"
        self._words[self._first_word(cell)] = 0
        self._taken[cell] = 0
        self._free.append(cell)

    def revoke(self, cell: int) -> None:
        """Fence a store: what its copy reads from now on is never committed. One word, no wait."""
        assert self._taken[cell], f"cell {cell} is not taken"
        self._words[self._first_word(cell) + _REVOKED] = 1

    def is_revoked(self, cell: int) -> bool:
        return self._words[self._first_word(cell) + _REVOKED] != 0

    def job_id(self, cell: int) -> int | None:
        """The job of a cell; None when it is free."""
        return self._words[self._first_word(cell)] or None

    def incarnation(self, cell: int) -> int:
        """The copier that started this cell's load; 0 before."""
        return self._words[self._first_word(cell) + _INCARNATION]

    def is_loaded(self, cell: int, job_id: int) -> bool:
        """Whether the copier marked this very job done. Changes nothing."""
        word = self._first_word(cell)
        return self._words[word] == job_id and self._words[word + _STATE] == _DONE

    def try_end_load(self, cell: int) -> LoadProof:
        """Revoke a load and say what is proven of it. Never waits; ask again until final.

        The lock is tried after the cell is revoked, and a copier reads the cell
        under the lock: so whoever gets it first, the other one knows.
        """
        self.revoke(cell)
        offset_bytes = HEADER_BYTES + CELL_BYTES * cell
        fd = self.memory.fd
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset_bytes)
        except OSError:
            # Held by a copier; or the kernel has no room for a lock: not proven either way.
            return LoadProof.RUNNING
        try:
            state = self._words[self._first_word(cell) + _STATE]
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, offset_bytes)
        return _PROOF_OF_STATE.get(state, LoadProof.INTERRUPTED)

    @property
    def bell(self) -> int:
        """The last value rung. Jobs that wait for the end of this step carry `next_bell`."""
        return self._words[_DOORBELL_WORD]

    @property
    def next_bell(self) -> int:
        return self._words[_DOORBELL_WORD] + 1

    def ring(self) -> int:
        """Ring the doorbell: all that was computed before may be copied. The value rung."""
        bell = self._words[_DOORBELL_WORD] + 1
        self._words[_DOORBELL_WORD] = bell
        return bell

    def close(self) -> None:
        """Unmap and close; the page must not be used any more."""
        self._words.release()
        self.memory.close()

    @staticmethod
    def _first_word(cell: int) -> int:
        return _CELLS_WORD0 + _CELL_WORDS * cell


_PROOF_OF_STATE = {
    _UNTOUCHED: LoadProof.UNTOUCHED,
    _DONE: LoadProof.LOADED,
    _GIVEN_UP: LoadProof.GIVEN_UP,
}

"""Running a batch: copy, and prove by the ticket that the copy may count.

Owns a mapped pool together with its ticket page, and the store under way. Runs
in a copier, on its only thread. Sends nothing: it answers the end of a batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffd.copier.batch import Spans, spans_of
from kvoffd.copier.frames import BatchEnd, LoadBatch, Outcome
from kvoffd.copier.tickets import TicketPage
from kvoffd.errors import KvoffdError, MemoryRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvoffd.copier.frames import Batch, StoreBatch
    from kvoffd.devices.base import Device, OpenPool, PoolDescription

#: Bytes between two looks at frames and tickets: about 1 ms. Smaller costs calls, larger
#: makes loads wait behind a store, and a client behind a load that it has revoked.
SLICE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PoolInCopier:
    """A pool and the ticket page of its rank."""

    pool: OpenPool
    tickets: TicketPage
    arena_bytes: int

    @classmethod
    def open(
        cls, device: Device, arena_bytes: int, description: PoolDescription, fds: Sequence[int]
    ) -> PoolInCopier:
        """Map both; the last descriptor is the ticket page's. All stay the caller's.

        Raises:
            MemoryRefused: one of them is not as described. Nothing stays mapped.
        """
        if len(fds) != len(description.memory_sizes) + 1:
            raise MemoryRefused(f"{len(fds)} descriptors came with the pool.")
        pool = device.open_pool(description, fds[:-1])
        try:
            tickets = TicketPage(fds[-1], description.ticket_cells)
        except BaseException:
            pool.close()
            raise
        return cls(pool, tickets, arena_bytes)

    def spans_of(self, batch: Batch) -> Spans:
        """The batch's spans, proven to lie inside; its cell, too.

        Raises:
            CopyFailed: anything would lie outside.
        """
        if not 0 <= batch.ticket_cell < self.tickets.cells:
            raise MemoryRefused(f"The ticket page has no cell {batch.ticket_cell}.")
        shard_bytes = self.pool.shard_bytes.get(batch.group)
        return spans_of(batch, shard_bytes, self.pool.pool_blocks, self.arena_bytes)

    def close(self) -> None:
        """Unmap both."""
        self.tickets.close()
        self.pool.close()


class StoreUnderWay:
    """A store between its first slice and its end."""

    def __init__(self, device: Device, pool: PoolInCopier, batch: StoreBatch) -> None:
        self.batch = batch
        self._device = device
        self._pool = pool
        self._slices: Iterator[Spans] | None = None
        self._bytes_copied = 0
        self._busy_ns = 0

    def copy_slice(self) -> BatchEnd | None:
        """Copy the next piece; the end when it was the last, or there is no point in more."""
        began_ns = time.perf_counter_ns()
        try:
            if self._slices is None:
                self._slices = _slices_of(self._pool.spans_of(self.batch))
            piece = next(self._slices, None)
            if piece is not None and self._is_live():
                batch = self.batch
                self._device.copy_out(self._pool.pool, batch.group, piece.block_ids, piece.slots)
                self._bytes_copied += len(piece) * piece.shard_bytes
        except (KvoffdError, OSError, TypeError, ValueError, IndexError) as error:
            return self._end(Outcome.FAILED, str(error))
        finally:
            self._busy_ns += time.perf_counter_ns() - began_ns
        # The cell is read after the bytes: a block that was reused under the
        # copy was revoked before it was given away, so this read sees it.
        if not self._is_live():
            return self._end(Outcome.REVOKED)
        return self._end(Outcome.COPIED) if piece is None else None

    def cancelled(self) -> BatchEnd:
        """The end of a store that is not to be finished."""
        return self._end(Outcome.CANCELLED)

    def _is_live(self) -> bool:
        return self._pool.tickets.is_live(self.batch.ticket_cell, self.batch.job_id)

    def _end(self, outcome: Outcome, reason: str = "") -> BatchEnd:
        return BatchEnd(
            batch_id=self.batch.batch_id,
            outcome=outcome,
            reason=reason,
            bytes_copied=self._bytes_copied,
            busy_us=self._busy_ns // 1000,
        )


def run_load(
    device: Device, pool: PoolInCopier, load: LoadBatch, incarnation: int
) -> BatchEnd | None:
    """Do a whole load under its cell's lock. None when the client has the lock just now."""
    try:
        spans = pool.spans_of(load)
    except KvoffdError as error:
        return BatchEnd(batch_id=load.batch_id, outcome=Outcome.FAILED, reason=str(error))
    tickets, cell = pool.tickets, load.ticket_cell
    if not tickets.try_lock(cell):
        return None
    try:
        if not tickets.is_live(cell, load.job_id):
            tickets.give_up(cell, load.job_id)
            return BatchEnd(batch_id=load.batch_id, outcome=Outcome.REVOKED)
        tickets.begin(cell, incarnation)
        return _copy_load(device, pool, load, spans)
    finally:
        tickets.unlock(cell)


def end_unstarted(pool: PoolInCopier, batch: Batch, outcome: Outcome) -> BatchEnd:
    """End a batch that has not started; a load's cell says that nothing was written."""
    tickets, cell = pool.tickets, batch.ticket_cell
    # Without the lock the client is at the cell itself; then it needs no word of ours.
    if isinstance(batch, LoadBatch) and 0 <= cell < tickets.cells and tickets.try_lock(cell):
        tickets.give_up(cell, batch.job_id)
        tickets.unlock(cell)
    return BatchEnd(batch_id=batch.batch_id, outcome=outcome)


def _copy_load(device: Device, pool: PoolInCopier, load: LoadBatch, spans: Spans) -> BatchEnd:
    """Copy slice by slice, so that a client that has revoked waits for one slice only."""
    tickets, cell = pool.tickets, load.ticket_cell
    began_ns = time.perf_counter_ns()
    bytes_copied = 0
    outcome, reason = Outcome.COPIED, ""
    try:
        for piece in _slices_of(spans):
            if not tickets.is_live(cell, load.job_id):
                outcome = Outcome.REVOKED
                break
            device.copy_in(pool.pool, load.group, piece.block_ids, piece.slots)
            bytes_copied += len(piece) * piece.shard_bytes
    except (KvoffdError, OSError, TypeError, ValueError, IndexError) as error:
        outcome, reason = Outcome.FAILED, str(error)
    if outcome is Outcome.COPIED:
        tickets.finish(cell)
    else:
        tickets.give_up(cell, load.job_id)
    return BatchEnd(
        batch_id=load.batch_id,
        outcome=outcome,
        reason=reason,
        bytes_copied=bytes_copied,
        busy_us=(time.perf_counter_ns() - began_ns) // 1000,
    )


def _slices_of(spans: Spans) -> Iterator[Spans]:
    """Cut into pieces of about SLICE_BYTES."""
    step = max(1, SLICE_BYTES // spans.shard_bytes)
    for start in range(0, len(spans), step):
        end = start + step
        yield Spans(spans.block_ids[start:end], spans.slots[start:end], spans.shard_bytes)

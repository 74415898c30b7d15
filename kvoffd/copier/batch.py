"""Batches in a copier: their spans as arrays, and the order in which they run.

Owns the batches that have not started. Runs in a copier, on its only thread.
Touches neither memory nor sockets.

Order: loads before stores; within a direction pools take turns, and one pool's
batches keep their order, apart from those that had to wait for its doorbell.
"""

from __future__ import annotations

import collections
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffd.copier.frames import LoadBatch
from kvoffd.errors import CopyFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvoffd.copier.frames import Batch


@dataclass(frozen=True, slots=True)
class Spans:
    """Which block and which slot, pair by pair, all proven to lie inside."""

    block_ids: NDArray[np.uint32]
    #: Byte offsets into the arena.
    slots: NDArray[np.uint64]
    shard_bytes: int

    def __len__(self) -> int:
        return len(self.block_ids)


def spans_of(batch: Batch, shard_bytes: int | None, pool_blocks: int, arena_bytes: int) -> Spans:
    """Read a batch's arrays, and hold them against the pool and the arena.

    Raises:
        CopyFailed: anything would lie outside. Said before a byte is written.
    """
    if shard_bytes is None:
        raise CopyFailed(f"The pool has no group {batch.group}.")
    if len(batch.slots) % 8 or len(batch.block_ids) % 4:
        raise CopyFailed("The batch's arrays are cut off.")
    slots = np.frombuffer(batch.slots, np.dtype("<u8"))
    block_ids = np.frombuffer(batch.block_ids, np.dtype("<u4"))
    if len(slots) != len(block_ids):
        raise CopyFailed(f"The batch has {len(slots)} slots, but {len(block_ids)} blocks.")
    if len(slots) and int(block_ids.max()) >= pool_blocks:
        raise CopyFailed(f"Block {block_ids.max()} is not one of the pool's {pool_blocks}.")
    if len(slots) and int(slots.max()) + shard_bytes > arena_bytes:
        raise CopyFailed(f"A slot at byte {slots.max()} does not end within the arena.")
    return Spans(block_ids, slots, shard_bytes)


class Lane:
    """Batches of one direction that may run now."""

    def __init__(self) -> None:
        #: By pool; the first pool is the next one to be served.
        self._queues: collections.OrderedDict[int, collections.deque[Batch]] = (
            collections.OrderedDict()
        )

    def put(self, batch: Batch) -> None:
        self._queues.setdefault(batch.pool_id, collections.deque()).append(batch)

    def take(self) -> Batch | None:
        """The next batch; its pool goes to the end."""
        if not self._queues:
            return None
        pool_id, queue = self._queues.popitem(last=False)
        batch = queue.popleft()
        if queue:
            self._queues[pool_id] = queue
        return batch

    def discard(self, batch: Batch) -> bool:
        """Take this batch out; False when it is not here."""
        queue = self._queues.get(batch.pool_id)
        if queue is None or batch not in queue:
            return False
        queue.remove(batch)
        if not queue:
            del self._queues[batch.pool_id]
        return True

    def __bool__(self) -> bool:
        return bool(self._queues)


class WaitingBatches:
    """All batches that have not started: runnable, parked, or out of luck with a lock."""

    def __init__(self) -> None:
        self._loads = Lane()
        self._stores = Lane()
        self._by_id: dict[int, Batch] = {}
        #: By pool: (bell, arrival, batch id), the lowest bell first.
        self._parked: dict[int, list[tuple[int, int, int]]] = {}
        self._lock_waits: list[Batch] = []
        #: (deadline, batch id) of loads.
        self._deadlines: list[tuple[int, int]] = []
        self._arrivals = 0

    def put(self, batch: Batch, doorbell: int) -> None:
        """Queue a batch, or park it until the doorbell has reached its bell."""
        assert batch.batch_id not in self._by_id, f"Batch {batch.batch_id} came twice."
        self._by_id[batch.batch_id] = batch
        if isinstance(batch, LoadBatch):
            heapq.heappush(self._deadlines, (batch.deadline_ms, batch.batch_id))
        if batch.bell <= doorbell:
            self._lane(batch).put(batch)
        else:
            self._arrivals += 1
            parked = self._parked.setdefault(batch.pool_id, [])
            heapq.heappush(parked, (batch.bell, self._arrivals, batch.batch_id))

    def put_back(self, load: LoadBatch) -> None:
        """Its ticket's lock was taken: try it again at the next poll()."""
        self._by_id[load.batch_id] = load
        self._lock_waits.append(load)

    def poll(self, doorbell_of: Callable[[int], int]) -> None:
        """Make runnable what has waited for a doorbell that has rung, or for a lock."""
        for load in self._lock_waits:
            if load.batch_id in self._by_id:
                self._loads.put(load)
        self._lock_waits.clear()
        for pool_id, parked in list(self._parked.items()):
            doorbell = doorbell_of(pool_id)
            while parked:
                bell, _, batch_id = parked[0]
                batch = self._by_id.get(batch_id)
                # One that was cancelled goes, too, or it would have us poll for ever.
                if batch is not None and bell > doorbell:
                    break
                heapq.heappop(parked)
                if batch is not None:
                    self._lane(batch).put(batch)
            if not parked:
                del self._parked[pool_id]

    def take_load(self) -> Batch | None:
        """The next load to run."""
        return self._started(self._loads.take())

    def take_store(self) -> Batch | None:
        """The next store to run."""
        return self._started(self._stores.take())

    def take_overdue(self, now_ms: int) -> Iterator[Batch]:
        """Loads whose deadline has passed; they are waiting no longer."""
        while self._deadlines and self._deadlines[0][0] < now_ms:
            batch = self.take(heapq.heappop(self._deadlines)[1])
            if batch is not None:
                yield batch

    def take(self, batch_id: int) -> Batch | None:
        """Take one batch out, wherever it waits; None when it waits nowhere."""
        batch = self._by_id.pop(batch_id, None)
        if batch is not None and not self._lane(batch).discard(batch):
            # Parked ones stay in their heap by number only, and are passed over there.
            self._lock_waits = [load for load in self._lock_waits if load is not batch]
        return batch

    def take_pool(self, pool_id: int) -> list[Batch]:
        """Take out all batches of a pool."""
        self._parked.pop(pool_id, None)
        numbers = [number for number, batch in self._by_id.items() if batch.pool_id == pool_id]
        return [batch for batch in map(self.take, numbers) if batch is not None]

    @property
    def has_runnable(self) -> bool:
        """Something can run without waiting."""
        return bool(self._loads) or bool(self._stores)

    @property
    def must_poll(self) -> bool:
        """Something waits for a word or a lock that nobody announces."""
        return bool(self._parked) or bool(self._lock_waits)

    def _lane(self, batch: Batch) -> Lane:
        return self._loads if isinstance(batch, LoadBatch) else self._stores

    def _started(self, batch: Batch | None) -> Batch | None:
        if batch is not None:
            del self._by_id[batch.batch_id]
        return batch

"""The order in which waiting batches run, without a process: pure bookkeeping."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvoffd.copier.batch import WaitingBatches, spans_of
from kvoffd.copier.frames import (
    FRAME_BLOCKS_MAX,
    FRAME_BYTES_MAX,
    BatchPart,
    LoadBatch,
    StoreBatch,
    encode_frame,
    pack_block_ids,
    pack_slots,
    split_batch,
)
from kvoffd.errors import CopyFailed


def _store(number: int, pool: int = 1, bell: int = 0, blocks: int = 1) -> StoreBatch:
    return StoreBatch(
        batch_id=number,
        pool_id=pool,
        group=0,
        job_id=number,
        ticket_cell=0,
        bell=bell,
        slots=pack_slots(range(blocks)),
        block_ids=pack_block_ids(range(blocks)),
    )


def _load(number: int, pool: int = 1, bell: int = 0, deadline_ms: int = 1000) -> LoadBatch:
    fields = msgspec.structs.asdict(_store(number, pool, bell))
    return LoadBatch(deadline_ms=deadline_ms, **fields)


def _stores(waiting: WaitingBatches) -> list[int]:
    taken = []
    while (batch := waiting.take_store()) is not None:
        taken.append(batch.batch_id)
    return taken


def test_pools_take_turns_and_each_keeps_its_order():
    """One engine's backlog does not starve another's first batch."""
    waiting = WaitingBatches()
    for batch in (_store(1), _store(2), _store(3), _store(4, pool=2), _store(5, pool=2)):
        waiting.put(batch, doorbell=0)
    assert _stores(waiting) == [1, 4, 2, 5, 3]
    assert not waiting.has_runnable


def test_parked_batches_become_runnable_by_their_bells():
    """Only those whose bell has rung, the lowest bell first."""
    waiting = WaitingBatches()
    for batch in (_store(1, bell=3), _store(2, bell=1), _store(3, bell=2), _store(4, bell=9)):
        waiting.put(batch, doorbell=0)
    assert (waiting.has_runnable, waiting.must_poll) == (False, True)
    waiting.poll(lambda _: 0)
    assert _stores(waiting) == []
    waiting.poll(lambda _: 3)
    assert _stores(waiting) == [2, 3, 1]
    assert waiting.must_poll


def test_nothing_is_polled_for_cancelled_batches():
    """A parked batch that was taken out does not keep the process awake."""
    waiting = WaitingBatches()
    waiting.put(_store(1, bell=1), doorbell=0)
    assert waiting.take(1).batch_id == 1
    assert waiting.take(1) is None
    waiting.poll(lambda _: 0)
    assert not waiting.must_poll


def test_a_load_without_its_lock_comes_back_at_the_next_poll():
    """It is neither lost nor tried in a tight circle."""
    waiting = WaitingBatches()
    waiting.put(_load(1), doorbell=0)
    load = waiting.take_load()
    waiting.put_back(load)
    assert waiting.take_load() is None
    assert (waiting.has_runnable, waiting.must_poll) == (False, True)
    waiting.poll(lambda _: 0)
    assert waiting.take_load() is load
    waiting.put_back(load)
    assert waiting.take(1) is load
    waiting.poll(lambda _: 0)
    assert (waiting.has_runnable, waiting.must_poll) == (False, False)


def test_overdue_loads_are_taken_wherever_they_wait():
    """Runnable, parked or without a lock; those that have started are not."""
    waiting = WaitingBatches()
    waiting.put(_load(3, deadline_ms=30), doorbell=0)
    waiting.put_back(waiting.take_load())
    waiting.put(_load(4, deadline_ms=5), doorbell=0)
    assert waiting.take_load().batch_id == 4
    waiting.put(_load(1, deadline_ms=10), doorbell=0)
    waiting.put(_load(2, deadline_ms=20, bell=1), doorbell=0)
    waiting.put(_load(5, deadline_ms=31), doorbell=0)
    assert [batch.batch_id for batch in waiting.take_overdue(31)] == [1, 2, 3]
    waiting.poll(lambda _: 1)
    assert waiting.take_load().batch_id == 5
    assert waiting.take_load() is None


def test_a_pool_takes_all_its_batches_with_it():
    """Loads, stores, parked ones and those without a lock; other pools keep theirs."""
    waiting = WaitingBatches()
    waiting.put(_load(1), doorbell=0)
    waiting.put_back(waiting.take_load())
    for batch in (_load(2), _store(3), _store(4, bell=1), _store(5, pool=2)):
        waiting.put(batch, doorbell=0)
    assert sorted(batch.batch_id for batch in waiting.take_pool(1)) == [1, 2, 3, 4]
    assert not waiting.must_poll
    assert _stores(waiting) == [5]


@pytest.mark.parametrize("blocks", [0, 1, FRAME_BLOCKS_MAX, FRAME_BLOCKS_MAX + 1, 3 * 4096])
def test_frames_of_a_batch_hold_all_its_blocks_in_order(blocks):
    """However long it is: every frame within its bound, and the batch's own frame last."""
    batch = _store(2**62, blocks=blocks)
    *parts, last = split_batch(batch)
    assert all(isinstance(part, BatchPart) for part in parts)
    assert all(len(encode_frame(frame)) <= FRAME_BYTES_MAX for frame in [*parts, last])
    assert b"".join(part.slots for part in parts) + last.slots == batch.slots
    assert b"".join(part.block_ids for part in parts) + last.block_ids == batch.block_ids
    assert msgspec.structs.replace(last, slots=batch.slots, block_ids=batch.block_ids) == batch


def test_spans_are_the_pairs_of_the_batch():
    """Block ids and offsets keep their order and their width."""
    batch = msgspec.structs.replace(
        _store(1), slots=pack_slots([2**40, 0]), block_ids=pack_block_ids([9, 2**32 - 2])
    )
    spans = spans_of(batch, 64, 2**32 - 1, 2**41)
    assert spans.slots.tolist() == [2**40, 0]
    assert spans.block_ids.tolist() == [9, 2**32 - 2]
    assert spans.block_ids.dtype == np.uint32
    cut = msgspec.structs.replace(batch, slots=batch.slots[:-1])
    with pytest.raises(CopyFailed, match="cut off"):
        spans_of(cut, 64, 2**32 - 1, 2**41)

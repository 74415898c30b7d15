"""Bytes that go through a real copier process arrive where they were sent, and only there."""

from __future__ import annotations

import numpy as np
import pytest
from copier.rig import BLOCK_BYTES, SHARD_BYTES, Rig

from kvoffd.copier.frames import FRAME_BLOCKS_MAX, Outcome


def test_a_store_and_a_load_carry_every_byte_of_each_region(run):
    """What is stored from one block is loaded into another, byte for byte, and nothing else."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            slots = [SHARD_BYTES * place for place in (7, 0, 3)]
            before = [engine.block(block) for block in (5, 2, 9)]
            arena_before = bytearray(rig.arena.buffer[:])
            end = await rig.end(rig.store(pool, rig.job(engine), [5, 2, 9], slots))
            assert (end.outcome, end.bytes_copied) == (Outcome.COPIED, 3 * SHARD_BYTES)
            for slot, shard in zip(slots, before, strict=True):
                arena_before[slot : slot + SHARD_BYTES] = shard
            assert rig.arena.buffer[:] == bytes(arena_before)

            untouched = {block: engine.block(block) for block in range(16)}
            job = rig.job(engine)
            end = await rig.end(rig.load(pool, job, [0, 1, 15], slots))
            assert (end.outcome, end.bytes_copied) == (Outcome.COPIED, 3 * SHARD_BYTES)
            expected = untouched | dict(zip([0, 1, 15], before, strict=True))
            assert {block: engine.block(block) for block in range(16)} == expected
            assert engine.tickets.is_loaded(job[1], job[0])
            assert engine.tickets.incarnation(job[1]) == rig.copier.incarnation
            assert rig.copier.store_bytes == rig.copier.load_bytes == 3 * SHARD_BYTES
            assert rig.copier.batches_in_flight == 0

    run(scenario)


def test_a_batch_longer_than_a_frame_is_put_together_again(run):
    """Parts of a batch make one batch with one end, in the order of its blocks."""

    async def scenario():
        async with Rig(arena_bytes=32 << 20) as rig:
            engine = rig.engine(block_bytes=64)
            pool = await rig.open(engine)
            blocks = np.random.default_rng(3).integers(0, 16, 2 * FRAME_BLOCKS_MAX + 5).tolist()
            slots = [256 * place for place in range(len(blocks))]
            batch = rig.store(pool, rig.job(engine), blocks, slots)
            assert (await rig.end(batch)).outcome is Outcome.COPIED
            expected = b"".join(engine.block(block) for block in blocks)
            assert rig.slot(0, len(expected)) == expected
            assert rig.ends_count == {batch: 1}

    run(scenario)


def test_two_pools_do_not_touch_each_other(run):
    """Equal block ids of two engines are different bytes."""

    async def scenario():
        async with Rig() as rig:
            first, second = rig.engine(seed=1), rig.engine(seed=2)
            pools = [await rig.open(first), await rig.open(second)]
            batches = [
                rig.store(pools[0], rig.job(first), [4], [0]),
                rig.store(pools[1], rig.job(second), [4], [SHARD_BYTES]),
            ]
            for batch in batches:
                assert (await rig.end(batch)).outcome is Outcome.COPIED
            assert rig.slot(0) == first.block(4)
            assert rig.slot(SHARD_BYTES) == second.block(4)

    run(scenario)


@pytest.mark.parametrize(
    ("blocks", "slots", "group", "cell"),
    [
        ([16], [0], 0, None),
        ([0], [(1 << 20) - SHARD_BYTES + 1], 0, None),
        ([0], [2**64 - 8], 0, None),
        ([0, 1], [0], 0, None),
        ([0], [0], 1, None),
        ([0], [0], 0, 64),
    ],
    ids=["block", "slot", "slot overflow", "lengths", "group", "cell"],
)
def test_what_lies_outside_fails_before_a_byte_is_written(run, blocks, slots, group, cell):
    """A batch that would leave the pool, the arena or the page fails as a whole."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            before = (rig.arena.buffer[:], engine.pool())
            for submit in (rig.store, rig.load):
                job_id, good_cell = rig.job(engine)
                job = (job_id, good_cell if cell is None else cell)
                # A good span goes first: it must not be copied either.
                end = await rig.end(submit(pool, job, [3, *blocks], [0, *slots], group=group))
                assert (end.outcome, end.bytes_copied) == (Outcome.FAILED, 0)
                assert end.reason.endswith(".")
            assert (rig.arena.buffer[:], engine.pool()) == before
            job = rig.job(engine)
            assert (await rig.end(rig.store(pool, job, [0], [0]))).outcome is Outcome.COPIED

    run(scenario)


def test_a_large_block_takes_several_slices(run):
    """A batch of many slices is one batch; between its slices frames are read."""

    async def scenario():
        async with Rig(arena_bytes=64 << 20) as rig:
            engine = rig.engine(pool_blocks=16, block_bytes=1 << 20)
            pool = await rig.open(engine)
            blocks = list(range(15, -1, -1))
            slots = [engine.shard_bytes * place for place in range(16)]
            store = rig.store(pool, rig.job(engine), blocks, slots)
            assert (await rig.end(store)).outcome is Outcome.COPIED
            expected = [engine.block(block) for block in blocks]
            for place, shard in enumerate(expected):
                assert rig.slot(slots[place], engine.shard_bytes) == shard
            load = rig.load(pool, rig.job(engine), list(range(16)), slots)
            assert (await rig.end(load)).outcome is Outcome.COPIED
            assert [engine.block(block) for block in range(16)] == expected

    run(scenario)


def test_loads_overtake_stores(run):
    """A load that is submitted after many stores does not wait for them all."""

    async def scenario():
        async with Rig(arena_bytes=64 << 20) as rig:
            engine = rig.engine(pool_blocks=8, block_bytes=1 << 20)
            pool = await rig.open(engine)
            blocks, slots = list(range(8)), [engine.shard_bytes * n for n in range(8)]
            stores = [rig.store(pool, rig.job(engine), blocks, slots) for _ in range(8)]
            load = rig.load(pool, rig.job(engine), [0], [engine.shard_bytes * 9])
            await rig.end(load)
            assert rig.ends_count[stores[-1]] == 0
            for store in stores:
                assert (await rig.end(store)).outcome is Outcome.COPIED
            order = [event[1] for event in rig.events if event[0] == "end" and event[1] != load]
            assert order == stores

    run(scenario)


def test_block_bytes_of_the_rig_are_what_the_tests_assume():
    """The slot arithmetic of these tests hangs on it."""
    assert SHARD_BYTES == 4 * BLOCK_BYTES

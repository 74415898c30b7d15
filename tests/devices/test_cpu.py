"""The cpu device against an oracle that copies byte by byte, over many layouts."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.devices.base import PoolDescription, Region
from kvoffd.devices.cpu import CpuDevice
from kvoffd.devices.opening import open_device
from kvoffd.errors import BadRequest, MemoryRefused
from kvoffd_client.memory import SharedMemory

ARENA_BYTES = 1 << 16


@contextlib.contextmanager
def _device(sizes, seed=0):
    random = np.random.default_rng(seed)
    arena = SharedMemory.create("arena", ARENA_BYTES)
    arena.buffer[:] = random.bytes(ARENA_BYTES)
    memories = [SharedMemory.create("pool", size) for size in sizes]
    for memory, size in zip(memories, sizes, strict=True):
        memory.buffer[:] = random.bytes(size)
    device = CpuDevice(arena.fd, ARENA_BYTES)
    try:
        yield device, arena, memories
    finally:
        device.close()
        for memory in [arena, *memories]:
            memory.close()


def _places(description, group, block, slot):
    """(memory, offset in it, offset in the arena) of each byte of a shard: the oracle."""
    for region in description.regions:
        if region.group == group:
            start = region.offset_bytes + block * region.block_stride_bytes
            for byte in range(region.block_bytes):
                yield region.memory, start + byte, slot
                slot += 1


def _check_both_ways(description, sizes, seed):
    """Store, then load, all blocks of all groups; every byte of everything is compared."""
    random = np.random.default_rng(seed)
    with _device(sizes, seed) as (device, arena, memories):
        pool = device.open_pool(description, [memory.fd for memory in memories])
        assert pool.shard_bytes == description.shard_bytes()
        for group, shard_bytes in pool.shard_bytes.items():
            count = min(description.pool_blocks, 6)
            blocks = random.permutation(description.pool_blocks)[:count]
            first = int(random.integers(0, 9))
            slots = first + random.permutation(count) * shard_bytes
            for copy in ("out", "in"):
                expected_arena = bytearray(arena.buffer[:])
                expected_pools = [bytearray(memory.buffer[:]) for memory in memories]
                for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
                    for memory, there, here in _places(description, group, block, slot):
                        if copy == "out":
                            expected_arena[here] = expected_pools[memory][there]
                        else:
                            expected_pools[memory][there] = expected_arena[here]
                method = device.copy_out if copy == "out" else device.copy_in
                method(pool, group, blocks.astype(np.uint32), slots.astype(np.uint64))
                assert arena.buffer[:] == bytes(expected_arena)
                found = [memory.buffer[:] for memory in memories]
                assert found == [bytes(pool_bytes) for pool_bytes in expected_pools]
                # Other blocks from the same slots, so that a load changes something.
                blocks = blocks[::-1]
        pool.close()


@st.composite
def _layouts(draw):
    """Regions that do not overlap: layers one after another, interleaved, apart, of odd sizes."""
    pool_blocks = draw(st.integers(1, 9))
    memories = draw(st.integers(1, 3))
    ends = [0] * memories
    regions = []
    for group in range(draw(st.integers(1, 2))):
        for _ in range(draw(st.integers(1, 3))):
            memory = draw(st.integers(0, memories - 1))
            block_bytes = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 64]))
            gap_bytes = draw(st.sampled_from([0, 0, 1, 4, 8]))
            layers = draw(st.integers(1, 4))
            interleaved = draw(st.booleans())
            start = ends[memory] + gap_bytes
            piece = block_bytes + gap_bytes
            for layer in range(layers):
                stride = piece * layers if interleaved else piece
                offset = layer * (piece if interleaved else piece * pool_blocks)
                regions.append(
                    Region(
                        group=group,
                        memory=memory,
                        offset_bytes=start + offset,
                        block_stride_bytes=stride,
                        block_bytes=block_bytes,
                    )
                )
            ends[memory] = start + piece * layers * pool_blocks
    order = draw(st.sampled_from(["as is", "reversed", "shuffled"]))
    if order == "reversed":
        regions.reverse()
    elif order == "shuffled":
        regions = draw(st.permutations(regions))
    sizes = tuple(max(1, end) for end in ends)
    description = PoolDescription(
        regions=tuple(regions), pool_blocks=pool_blocks, memory_sizes=sizes, ticket_cells=1
    )
    return description, sizes


@settings(max_examples=60, deadline=None)
@given(layout=_layouts(), seed=st.integers(0, 2**32 - 1))
def test_every_byte_goes_where_the_layout_says(layout, seed):
    """Whatever the regions, in both directions, and no other byte changes."""
    description, sizes = layout
    _check_both_ways(description, sizes, seed)


def _layers(count, step, stride, block_bytes, start=0):
    return tuple(
        Region(
            group=0,
            memory=0,
            offset_bytes=start + layer * step,
            block_stride_bytes=stride,
            block_bytes=block_bytes,
        )
        for layer in range(count)
    )


@pytest.mark.parametrize(
    ("regions", "runs", "word_bytes"),
    [
        (_layers(8, 1024, 64, 64), 1, 8),
        (_layers(8, 64, 512, 64), 1, 8),
        (_layers(8, 1024, 64, 60), 1, 4),
        (_layers(8, 1024, 64, 64, start=2), 1, 2),
        (_layers(8, 1023, 63, 63), 1, 1),
        (_layers(3, 1024, 64, 64) + _layers(3, 1024, 64, 64, start=5000), 2, 8),
        (tuple(reversed(_layers(3, 1024, 64, 64))), 3, 8),
        (_layers(1, 0, 64, 64) * 2, 2, 8),
    ],
    ids=["layers", "interleaved", "words of 4", "of 2", "of 1", "a gap", "backwards", "twice"],
)
def test_even_regions_are_one_view_of_the_widest_words(regions, runs, word_bytes):
    """So that a block is one call; anything uneven is cut, not guessed."""
    description = PoolDescription(
        regions=regions, pool_blocks=8, memory_sizes=(16384,), ticket_cells=1
    )
    with _device((16384,)) as (device, _, memories):
        pool = device.open_pool(description, [memories[0].fd])
        assert len(pool.runs[0]) == runs
        assert pool.runs[0][0].view.dtype.itemsize == word_bytes
        pool.close()


def test_a_slot_that_leaves_the_arena_is_never_written():
    """The device itself refuses, whoever forgot to ask."""
    description = PoolDescription(
        regions=_layers(1, 0, 64, 64), pool_blocks=8, memory_sizes=(512,), ticket_cells=1
    )
    with _device((512,)) as (device, arena, memories):
        pool = device.open_pool(description, [memories[0].fd])
        before = arena.buffer[:]
        blocks = np.array([1], np.uint32)
        for slot in (ARENA_BYTES - 63, ARENA_BYTES, 2**63):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                device.copy_out(pool, 0, blocks, np.array([slot], np.uint64))
        with pytest.raises(IndexError):
            device.copy_out(pool, 0, np.array([8], np.uint32), np.array([0], np.uint64))
        assert arena.buffer[:] == before
        pool.close()


def test_a_pool_that_is_refused_leaves_nothing_mapped():
    """The memories before the bad one are unmapped again."""
    good, small = SharedMemory.create("good-pool", 512), SharedMemory.create("small-pool", 100)
    description = PoolDescription(
        regions=_layers(1, 0, 64, 64), pool_blocks=8, memory_sizes=(512, 101), ticket_cells=1
    )
    with _device(()) as (device, _, _memories):
        with pytest.raises(MemoryRefused, match=r"Memory 1 has 100 bytes, but 101"):
            device.open_pool(description, [good.fd, small.fd])
        with open("/proc/self/maps") as maps:  # noqa: PTH123 - a file of the kernel's
            assert "good-pool" not in maps.read()
    good.close()
    small.close()


def test_a_name_that_is_no_device_is_refused():
    """With a sentence that says what there is."""
    with pytest.raises(BadRequest, match=r"'cuda:0' cannot be served: only cpu:N can"):
        open_device("cuda:0", 0, 0)

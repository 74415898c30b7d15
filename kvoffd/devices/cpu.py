"""The cpu device: pools in shared memory, copied by numpy.

Owns the mappings of the arena and of the pools. Runs in a copier, on its only
thread. A block is one numpy call for each run of equal, evenly spaced regions;
no call makes a temporary, and none allocates but a few bytes for a view.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffd.devices.memory import map_shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvoffd.devices.base import PoolDescription, Region

#: Widest first: fewer elements a copy.
_WORDS = (np.dtype("<u8"), np.dtype("<u4"), np.dtype("<u2"), np.dtype("u1"))


@dataclass(frozen=True, slots=True)
class _Run:
    """Regions of one memory that a single strided view reaches."""

    #: Shape (regions, pool blocks, words).
    view: NDArray[np.generic]
    #: Where its first byte lies in a slot.
    shard_offset_bytes: int


class CpuPool:
    """A mapped pool. Made by CpuDevice only."""

    def __init__(self, description: PoolDescription, memories: Sequence[mmap.mmap]) -> None:
        self.shard_bytes = description.shard_bytes()
        self.pool_blocks = description.pool_blocks
        self._memories = tuple(memories)
        self.runs = {
            group: _runs_of_group(description, group, memories) for group in self.shard_bytes
        }

    def close(self) -> None:
        """Unmap it. No copy may be running."""
        # A view keeps its mapping; all must go before the mapping can.
        self.runs.clear()
        for memory in self._memories:
            memory.close()


class CpuDevice:
    """Copies between the arena and pools, both mapped into this process."""

    def __init__(self, arena_fd: int, arena_bytes: int) -> None:
        self._arena = map_shared(arena_fd, arena_bytes, "The arena")
        self.arena_bytes = arena_bytes
        # A kernel that gives shared memory no huge pages is no failure.
        with contextlib.suppress(OSError):
            self._arena.madvise(mmap.MADV_HUGEPAGE)

    def open_pool(self, description: PoolDescription, fds: Sequence[int]) -> CpuPool:
        """Map a pool; one descriptor a memory, which stay the caller's.

        Raises:
            MemoryRefused: a memory is not what it was described as. Nothing stays mapped.
        """
        description.check()
        with contextlib.ExitStack() as undo:
            memories = []
            sizes = zip(fds, description.memory_sizes, strict=True)
            for index, (fd, size_bytes) in enumerate(sizes):
                memories.append(map_shared(fd, size_bytes, f"Memory {index}"))
                undo.callback(memories[-1].close)
            pool = CpuPool(description, memories)
            undo.pop_all()
        return pool

    def copy_out(
        self, pool: CpuPool, group: int, block_ids: NDArray[np.uint32], slots: NDArray[np.uint64]
    ) -> None:
        """Store: blocks of the pool into the arena at these byte offsets."""
        runs = pool.runs[group]
        for block, slot in zip(block_ids.tolist(), slots.tolist(), strict=True):
            for run in runs:
                self._shard_view(run, slot)[...] = run.view[:, block]

    def copy_in(
        self, pool: CpuPool, group: int, block_ids: NDArray[np.uint32], slots: NDArray[np.uint64]
    ) -> None:
        """Load: the arena at these byte offsets into blocks of the pool."""
        runs = pool.runs[group]
        for block, slot in zip(block_ids.tolist(), slots.tolist(), strict=True):
            for run in runs:
                run.view[:, block] = self._shard_view(run, slot)

    def close(self) -> None:
        """Unmap the arena. All pools must be closed."""
        self._arena.close()

    def _shard_view(self, run: _Run, slot: int) -> NDArray[np.generic]:
        """The run's bytes of a slot; numpy refuses one that leaves the arena."""
        regions, _, words = run.view.shape
        return np.ndarray(
            (regions, words), run.view.dtype, self._arena, slot + run.shard_offset_bytes
        )


def _runs_of_group(
    description: PoolDescription, group: int, memories: Sequence[mmap.mmap]
) -> tuple[_Run, ...]:
    """Merge the group's regions, in order, into as few views as possible."""
    runs: list[_Run] = []
    shard_offset_bytes = 0
    for merged in _merge([region for region in description.regions if region.group == group]):
        first = merged[0]
        step_bytes = merged[1].offset_bytes - first.offset_bytes if len(merged) > 1 else 0
        word = _widest_word(first, step_bytes, shard_offset_bytes)
        view: NDArray[np.generic] = np.ndarray(
            (len(merged), description.pool_blocks, first.block_bytes // word.itemsize),
            word,
            memories[first.memory],
            first.offset_bytes,
            (step_bytes, first.block_stride_bytes, word.itemsize),
        )
        runs.append(_Run(view, shard_offset_bytes))
        shard_offset_bytes += len(merged) * first.block_bytes
    return tuple(runs)


def _merge(regions: list[Region]) -> list[list[Region]]:
    """Cut a group's regions into maximal runs: one memory, one shape, one positive step."""
    merged: list[list[Region]] = []
    for region in regions:
        if merged and _continues(merged[-1], region):
            merged[-1].append(region)
        else:
            merged.append([region])
    return merged


def _continues(run: list[Region], region: Region) -> bool:
    last = run[-1]
    step_bytes = region.offset_bytes - last.offset_bytes
    same_shape = (last.memory, last.block_bytes, last.block_stride_bytes) == (
        region.memory,
        region.block_bytes,
        region.block_stride_bytes,
    )
    same_step = len(run) == 1 or step_bytes == run[1].offset_bytes - run[0].offset_bytes
    return same_shape and same_step and step_bytes > 0


def _widest_word(region: Region, step_bytes: int, shard_offset_bytes: int) -> np.dtype[np.generic]:
    """The widest word at whose multiples everything begins and ends."""
    common = math.gcd(
        region.offset_bytes,
        region.block_bytes,
        region.block_stride_bytes,
        step_bytes,
        shard_offset_bytes,
    )
    return next(word for word in _WORDS if common % word.itemsize == 0)

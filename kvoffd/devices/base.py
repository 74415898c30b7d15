"""What a device is: it opens a peer's pool and copies shards out of it and into it.

Owns the description of a pool and the protocol that devices fulfil. Devices
live in copier processes, on their only thread; descriptions travel there from
the control process. Nothing here touches memory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvoffd.errors import BadRequest, MemoryRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

#: Block ids travel as 32-bit words.
POOL_BLOCKS_MAX = 2**32 - 1
#: A memory larger than this is a mistake: it is the user's half of the address space.
MEMORY_BYTES_MAX = 2**47 - 1


class Region(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where one piece of each block lies: block b at offset_bytes + b * block_stride_bytes."""

    group: int
    #: Index of the memory, in the order of PoolDescription.memory_sizes.
    memory: int
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int


class PoolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's KV pool. Regions of a group are in the order of a shard's bytes."""

    regions: tuple[Region, ...]
    pool_blocks: int
    memory_sizes: tuple[int, ...]
    ticket_cells: int

    def shard_bytes(self) -> dict[int, int]:
        """Bytes of one shard, by group."""
        sizes: dict[int, int] = {}
        for region in self.regions:
            sizes[region.group] = sizes.get(region.group, 0) + region.block_bytes
        return sizes

    def check(self) -> None:
        """Compare the regions with the sizes of their memories.

        Raises:
            MemoryRefused: a region is empty, overlaps itself or leaves its memory.
        """
        if not self.regions:
            raise MemoryRefused("A pool needs at least one region.")
        if not 0 < self.pool_blocks <= POOL_BLOCKS_MAX:
            raise MemoryRefused(f"A pool cannot have {self.pool_blocks} blocks.")
        for index, size_bytes in enumerate(self.memory_sizes):
            if not 0 < size_bytes <= MEMORY_BYTES_MAX:
                raise MemoryRefused(f"Memory {index} cannot have {size_bytes} bytes.")
        for index, region in enumerate(self.regions):
            self._check_region(index, region)

    def _check_region(self, index: int, region: Region) -> None:
        if not 0 <= region.memory < len(self.memory_sizes):
            raise MemoryRefused(f"Region {index} lies in memory {region.memory}, never offered.")
        if region.block_bytes <= 0 or region.offset_bytes < 0:
            raise MemoryRefused(f"Region {index} has no bytes, or begins before its memory.")
        if region.block_stride_bytes < region.block_bytes:
            raise MemoryRefused(
                f"Region {index} has blocks of {region.block_bytes} bytes only "
                f"{region.block_stride_bytes} bytes apart."
            )
        end_bytes = (
            region.offset_bytes
            + (self.pool_blocks - 1) * region.block_stride_bytes
            + region.block_bytes
        )
        if end_bytes > self.memory_sizes[region.memory]:
            raise MemoryRefused(
                f"Region {index} ends at byte {end_bytes} of memory {region.memory}, "
                f"which has {self.memory_sizes[region.memory]}."
            )


class OpenPool(Protocol):
    """A pool that a device has mapped."""

    @property
    def shard_bytes(self) -> Mapping[int, int]:
        """Bytes of one shard, by group."""

    @property
    def pool_blocks(self) -> int:
        """Block ids are below this."""

    def close(self) -> None:
        """Unmap it. No copy may be running."""


class Device(Protocol):
    """Copies shards. Both copies return only when all bytes have arrived."""

    def open_pool(self, description: PoolDescription, fds: Sequence[int]) -> OpenPool:
        """Map a pool; one descriptor a memory, which stay the caller's.

        Raises:
            MemoryRefused: a memory is not what it was described as. Nothing stays mapped.
        """

    def copy_out(
        self, pool: Any, group: int, block_ids: NDArray[np.uint32], slots: NDArray[np.uint64]
    ) -> None:
        """Store: blocks of the pool into the arena at these byte offsets."""

    def copy_in(
        self, pool: Any, group: int, block_ids: NDArray[np.uint32], slots: NDArray[np.uint64]
    ) -> None:
        """Load: the arena at these byte offsets into blocks of the pool."""

    def close(self) -> None:
        """Unmap the arena. All pools must be closed."""


_CPU_NAME = re.compile(r"cpu:(0|[1-9][0-9]{0,3})", re.ASCII)


def check_device_name(name: str) -> None:
    """Accept the names of devices that can be served: cpu:N.

    Raises:
        BadRequest: any other name.
    """
    if _CPU_NAME.fullmatch(name) is None:
        raise BadRequest(f"Device {name!r} cannot be served: only cpu:N can, for example cpu:0.")

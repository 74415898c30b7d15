"""Pools: from a rank's description and the memories it has offered to a copier's.

Pure; runs on the loop thread. Nothing reaches a copier that does not lie within its
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvoffd.devices.base import PoolDescription, Region
from kvoffd.errors import BadRequest
from kvoffd.service.sessions import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.sessions import Memory

TICKET_HEADER_BYTES = 4096
TICKET_CELL_BYTES = 64


class RankDescription(NamedTuple):
    """What a rank says of itself; its regions name memories as they were offered."""

    rank: int
    device: str
    ticket_memory_index: int
    ticket_cells: int
    pool_blocks: int
    regions: tuple[Region, ...]


def describe(
    rank: RankDescription, memories: Mapping[int, Memory], options: ServiceOptions
) -> tuple[PoolDescription, list[int]]:
    """A pool as a copier takes it, and the descriptors that go with it.

    Raises:
        BadRequest: a number is out of range, or names a memory that is not there.
        MemoryRefused: a region does not lie within its memory.
    """
    _within("ticket_cells", rank.ticket_cells, options.ticket_cells_max)
    _within("pool_blocks", rank.pool_blocks, options.pool_blocks_max)
    _within("The number of regions", len(rank.regions), options.regions_max)
    tickets = _memory(memories, rank.ticket_memory_index, MemoryKind.TICKETS)
    due_bytes = TICKET_HEADER_BYTES + rank.ticket_cells * TICKET_CELL_BYTES
    if tickets.size_bytes < due_bytes:
        raise BadRequest(
            f"A ticket page of {rank.ticket_cells} cells has {due_bytes} bytes; memory "
            f"{tickets.memory_index} has {tickets.size_bytes}."
        )
    # The copier counts the memories of the pool alone, in the order of their first use.
    places: dict[int, int] = {}
    regions = []
    for region in rank.regions:
        _memory(memories, region.memory, MemoryKind.POOL)
        place = places.setdefault(region.memory, len(places))
        regions.append(
            Region(
                group=region.group,
                memory=place,
                offset_bytes=region.offset_bytes,
                block_stride_bytes=region.block_stride_bytes,
                block_bytes=region.block_bytes,
            )
        )
    used = [memories[index] for index in places]
    pool = PoolDescription(
        regions=tuple(regions),
        pool_blocks=rank.pool_blocks,
        memory_sizes=tuple(memory.size_bytes for memory in used),
        ticket_cells=rank.ticket_cells,
    )
    pool.check()
    return pool, [*(memory.fd for memory in used), tickets.fd]


def _within(name: str, value: int, value_max: int) -> None:
    if not 1 <= value <= value_max:
        raise BadRequest(f"{name} is {value}; from 1 to {value_max} is allowed.")


def _memory(memories: Mapping[int, Memory], memory_index: int, kind: MemoryKind) -> Memory:
    memory = memories.get(memory_index)
    if memory is None:
        raise BadRequest(f"Memory {memory_index} was not offered.")
    if memory.kind is not kind:
        raise BadRequest(
            f"Memory {memory_index} was offered as {memory.kind.value}, not as {kind.value}."
        )
    return memory

"""The copier without daemon, client and gRPC: what the data plane itself can do.

Owns one copier process, an arena of plain shared memory and a loop of its own.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from kvoffd.copier import frames
from kvoffd.copier.frames import BatchEnd, LoadBatch, Outcome, StoreBatch
from kvoffd.copier.supervisor import Copier, CopierOptions
from kvoffd.devices.base import PoolDescription, Region
from kvoffd_client.memory import SharedMemory
from kvoffd_client.tickets import TicketPage
from tests.bench.whole_path import JOBS_IN_FLIGHT

if TYPE_CHECKING:
    from tests.bench.whole_path import BlockShape

_DEADLINE_MS = 60_000


class CopierAlone:
    """Sends the batches that the daemon would send, and waits for their ends."""

    def __init__(self, shape: BlockShape, pool: SharedMemory) -> None:
        self._shape = shape
        self._loop = asyncio.new_event_loop()
        self._arena = SharedMemory.create("bench-arena", shape.total_bytes)
        # Populated, as a daemon's arena is once it has been in use.
        np.frombuffer(self._arena.buffer, dtype=np.uint64)[:] = 0
        self._tickets = TicketPage.create(64)
        self._ended: asyncio.Queue[BatchEnd] = asyncio.Queue(4096)
        self._number = 0
        drawn = np.random.default_rng(6)
        self._places = drawn.permutation(shape.blocks)
        self._slots = drawn.permutation(shape.blocks) * shape.block_bytes
        self._pool_id = self._loop.run_until_complete(self._start(pool))

    def batch_ended(self, end: BatchEnd) -> None:
        self._ended.put_nowait(end)

    def copier_up(self, incarnation: int, pidfd: int) -> None:
        """Nothing to tell to anybody."""

    def copier_died(self, incarnation: int, reason: str) -> None:
        raise AssertionError(f"copier {incarnation} died: {reason}")

    def store(self) -> float:
        """Seconds for the whole pool."""
        return self._loop.run_until_complete(self._run(loads=False))

    def load(self) -> float:
        return self._loop.run_until_complete(self._run(loads=True))

    def close(self) -> None:
        self._loop.run_until_complete(self._copier.stop())
        self._loop.close()
        self._tickets.close()
        self._arena.close()

    async def _start(self, pool: SharedMemory) -> int:
        self._copier = Copier(
            "cpu:0", self._arena.fd, self._arena.size_bytes, CopierOptions(), self
        )
        await self._copier.start()
        description = PoolDescription(
            regions=tuple(
                Region(
                    group=region.group,
                    memory=region.memory_index,
                    offset_bytes=region.offset_bytes,
                    block_stride_bytes=region.block_stride_bytes,
                    block_bytes=region.block_bytes,
                )
                for region in self._shape.regions()
            ),
            pool_blocks=self._shape.blocks,
            memory_sizes=(pool.size_bytes,),
            ticket_cells=self._tickets.cells,
        )
        return await self._copier.open_pool(description, [pool.fd, self._tickets.memory.fd])

    async def _run(self, *, loads: bool) -> float:
        batches = [
            self._batch(begin, loads=loads)
            for begin in range(0, self._shape.blocks, self._shape.job_blocks)
        ]
        waiting = list(reversed(batches))
        submit = self._copier.submit_load if loads else self._copier.submit_store
        in_flight = 0
        began_s = time.perf_counter()
        while waiting or in_flight:
            while waiting and in_flight < JOBS_IN_FLIGHT:
                submit(waiting.pop())
                in_flight += 1
            end = await self._ended.get()
            assert end.outcome is Outcome.COPIED, end
            in_flight -= 1
        took_s = time.perf_counter() - began_s
        for batch in batches:
            self._tickets.free(batch.ticket_cell)
        return took_s

    def _batch(self, begin: int, *, loads: bool) -> StoreBatch | LoadBatch:
        self._number += 1
        cell = self._tickets.allocate(self._number)
        assert cell is not None
        places = slice(begin, begin + self._shape.job_blocks)
        fields = {
            "batch_id": self._number,
            "pool_id": self._pool_id,
            "group": 0,
            "job_id": self._number,
            "ticket_cell": cell,
            "bell": self._tickets.bell,
            "slots": frames.pack_slots(int(slot) for slot in self._slots[places]),
            "block_ids": frames.pack_block_ids(int(place) for place in self._places[places]),
        }
        if not loads:
            return StoreBatch(**fields)
        return LoadBatch(**fields, deadline_ms=frames.monotonic_ms() + _DEADLINE_MS)

"""What the tests of copiers stand on: an arena, engines with pools, and a list of events."""

from __future__ import annotations

import asyncio
import collections
import os
from pathlib import Path

import numpy as np

from kvoffd.copier.frames import (
    BatchEnd,
    LoadBatch,
    StoreBatch,
    monotonic_ms,
    pack_block_ids,
    pack_slots,
)
from kvoffd.copier.supervisor import Copier, CopierOptions, PoolDescription, Region
from kvoffd_client.memory import SharedMemory
from kvoffd_client.tickets import TicketPage

BLOCK_BYTES = 1024
REGIONS = 4
SHARD_BYTES = BLOCK_BYTES * REGIONS
FAR_MS = 60_000


class Engine:
    """One rank: a pool of four regions in two memories, of its own random bytes."""

    def __init__(self, seed: int = 1, pool_blocks: int = 16, block_bytes: int = BLOCK_BYTES):
        self.pool_blocks = pool_blocks
        self.block_bytes = block_bytes
        half = 2 * pool_blocks * block_bytes
        self.memories = [SharedMemory.create(f"pool-{index}", half) for index in range(2)]
        self.tickets = TicketPage.create(64)
        self.description = PoolDescription(
            regions=tuple(
                Region(
                    group=0,
                    memory=index // 2,
                    offset_bytes=index % 2 * pool_blocks * block_bytes,
                    block_stride_bytes=block_bytes,
                    block_bytes=block_bytes,
                )
                for index in range(REGIONS)
            ),
            pool_blocks=pool_blocks,
            memory_sizes=(half, half),
            ticket_cells=64,
        )
        random = np.random.default_rng(seed)
        for memory in self.memories:
            memory.buffer[:] = random.bytes(half)

    @property
    def fds(self) -> list[int]:
        return [memory.fd for memory in self.memories] + [self.tickets.memory.fd]

    @property
    def shard_bytes(self) -> int:
        return self.block_bytes * REGIONS

    def block(self, block: int) -> bytes:
        """A block's bytes in the order of a shard."""
        pieces = []
        for region in self.description.regions:
            start = region.offset_bytes + block * region.block_stride_bytes
            pieces.append(self.memories[region.memory].buffer[start : start + region.block_bytes])
        return b"".join(pieces)

    def pool(self) -> bytes:
        return b"".join(memory.buffer[:] for memory in self.memories)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()
        self.tickets.close()


class Rig:
    """A copier over an arena of its own, its events in the order in which they came."""

    def __init__(self, arena_bytes: int = 1 << 20, **options):
        self.arena = SharedMemory.create("arena", arena_bytes)
        self.engines: list[Engine] = []
        self.events: list[tuple] = []
        self.ends: dict[int, BatchEnd] = {}
        self.ends_count: collections.Counter[int] = collections.Counter()
        self._happened = asyncio.Event()
        self.pidfds: list[int] = []
        self.copier = Copier(
            "cpu:0", self.arena.fd, arena_bytes, CopierOptions(**options), events=self
        )
        self._batch_ids = 0
        self._job_ids = 0

    # --- CopierEvents
    def batch_ended(self, end: BatchEnd) -> None:
        self.ends_count[end.batch_id] += 1
        self.ends[end.batch_id] = end
        self.events.append(("end", end.batch_id))
        self._happened.set()

    def copier_up(self, incarnation: int, pidfd: int) -> None:
        self.pidfds.append(os.dup(pidfd))
        self.events.append(("up", incarnation))
        self._happened.set()

    def copier_died(self, incarnation: int, reason: str) -> None:
        self.events.append(("died", incarnation, reason))
        self._happened.set()

    # --- Acts
    async def __aenter__(self):
        await self.copier.start()
        return self

    async def __aexit__(self, *_):
        await self.copier.stop()
        for engine in self.engines:
            engine.close()
        for pidfd in self.pidfds:
            os.close(pidfd)
        self.arena.close()

    def engine(self, **sizes) -> Engine:
        self.engines.append(Engine(**sizes))
        return self.engines[-1]

    async def open(self, engine: Engine) -> int:
        return await self.copier.open_pool(engine.description, engine.fds)

    def job(self, engine: Engine) -> tuple[int, int]:
        """A job id and its cell."""
        self._job_ids += 1
        cell = engine.tickets.allocate(self._job_ids)
        assert cell is not None
        return self._job_ids, cell

    def store(self, pool_id, job, blocks, slots, bell=0, group=0) -> int:
        self._batch_ids += 1
        self.copier.submit_store(
            StoreBatch(
                batch_id=self._batch_ids,
                pool_id=pool_id,
                group=group,
                job_id=job[0],
                ticket_cell=job[1],
                bell=bell,
                slots=pack_slots(slots),
                block_ids=pack_block_ids(blocks),
            )
        )
        return self._batch_ids

    def load(self, pool_id, job, blocks, slots, bell=0, group=0, budget_ms=FAR_MS) -> int:
        self._batch_ids += 1
        self.copier.submit_load(
            LoadBatch(
                batch_id=self._batch_ids,
                pool_id=pool_id,
                group=group,
                job_id=job[0],
                ticket_cell=job[1],
                bell=bell,
                slots=pack_slots(slots),
                block_ids=pack_block_ids(blocks),
                deadline_ms=monotonic_ms() + budget_ms,
            )
        )
        return self._batch_ids

    async def wait(self, condition) -> None:
        """Until the condition holds; it is asked after each event."""
        while not condition():
            self._happened.clear()
            await self._happened.wait()

    async def end(self, batch_id: int) -> BatchEnd:
        await self.wait(lambda: batch_id in self.ends)
        return self.ends[batch_id]

    async def round_trip(self) -> None:
        """Everything sent so far has been read by the copier, and its answers by us."""
        await self.copier.close_pool(await self.open(self.engine()))

    async def started(self, engine: Engine, cell: int) -> None:
        """Until the copier has begun the load of this cell: nobody announces that."""
        while engine.tickets.incarnation(cell) == 0:  # noqa: ASYNC110 - it is a word in memory
            await asyncio.sleep(0)

    def maps(self) -> str:
        """What the copier has mapped."""
        return Path(f"/proc/{self.copier.pid}/maps").read_text()

    def links(self) -> list[str]:
        """What the copier's descriptors are."""
        return [str(entry.readlink()) for entry in Path(f"/proc/{self.copier.pid}/fd").iterdir()]

    def slot(self, offset: int, size_bytes: int = SHARD_BYTES) -> bytes:
        return self.arena.buffer[offset : offset + size_bytes]

    def count(self, kind: str) -> int:
        return sum(event[0] == kind for event in self.events)

"""Stores and loads as an engine sees them: from the client's call to its completion.

Owns one instance of one rank over a real daemon. The caller's thread is the engine's.
"""

from __future__ import annotations

import hashlib
import select
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffd_client.descriptions import (
    EngineIdentity,
    RankDescription,
    RegionDescription,
    SessionOptions,
)
from kvoffd_client.memory import SharedMemory
from kvoffd_client.ports import LoadWork, SessionState, Step, StoreWork
from kvoffd_client.rank_session import RankSession
from kvoffd_client.scheduler_session import SchedulerSession
from kvoffd_client.tickets import TicketPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvoffd_client.ports import LookupResult

_WAIT_S = 60.0
# Four jobs hide the event loop's time between two of them; more only makes queues.
JOBS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One model's block, and how many of them make the benchmark's bytes."""

    name: str
    layers: int
    layer_bytes: int
    blocks: int
    #: Blocks of one job: what a step of a prefill would hand over.
    job_blocks: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.blocks

    def regions(self) -> tuple[RegionDescription, ...]:
        """Layer after layer, as vLLM lays its pool out."""
        plane = self.blocks * self.layer_bytes
        return tuple(
            RegionDescription(0, 0, layer * plane, self.layer_bytes, self.layer_bytes)
            for layer in range(self.layers)
        )


class BenchInstance:
    """One registered rank and its scheduler session, with a pool full of content."""

    def __init__(self, socket_path: str, shape: BlockShape) -> None:
        self.shape = shape
        options = SessionOptions(socket_path=socket_path)
        engine = EngineIdentity(
            instance_id=f"bench-{shape.name}",
            nonce=uuid.uuid4().hex,
            namespace=(("bench", f"{shape.name}-{uuid.uuid4().hex}"),),
            ranks_total=1,
        )
        self.pool = SharedMemory.create("bench-pool", shape.total_bytes)
        self.content = np.frombuffer(self.pool.buffer, dtype=np.uint64)
        self.fill()
        self.tickets = TicketPage.create(64)
        self.scheduler = SchedulerSession(options, engine)
        self.rank = RankSession(
            options,
            engine,
            RankDescription(0, "cpu:0", shape.blocks, (self.pool,), shape.regions()),
            self.tickets,
        )
        # Neighbours in a prefix do not lie side by side in a pool that has been in use.
        drawn = np.random.default_rng(5)
        self._places = drawn.permutation(shape.blocks)
        self._number = 0
        for session in (self.scheduler, self.rank):
            session.start()
        for session in (self.scheduler, self.rank):
            assert session.wait_until(SessionState.UP, _WAIT_S), session.status
        _wait_for(lambda: self.scheduler.instance_complete)

    def fill(self) -> None:
        """Other bytes in every word."""
        self.content[:] = np.arange(len(self.content), dtype=np.uint64)

    def hashes(self, salt: str) -> list[bytes]:
        return [
            hashlib.sha256(f"{salt} {block}".encode()).digest()
            for block in range(self.shape.blocks)
        ]

    def store(self, hashes: Sequence[bytes]) -> float:
        """Store the whole pool; seconds from the first call to the last completion."""
        generation = self._generation()
        steps = []
        for begin, end in self._cuts():
            self._number += 1
            cell = self.tickets.allocate(self._number)
            assert cell is not None
            work = StoreWork(
                job_id=self._number,
                generation=generation,
                group=0,
                ticket_cell=cell,
                bell=self.tickets.bell,
                parent_hash=hashes[begin - 1] if begin else b"",
                block_hashes=tuple(hashes[begin:end]),
                block_ids=self._block_ids(begin, end),
            )
            steps.append((Step(stores=(work,)), cell))
        return self._run(steps)

    def load(self, hashes: Sequence[bytes]) -> float:
        """Load all of it again; the lookups come before the clock starts."""
        generation = self._generation()
        found = [self.lookup(hashes[begin:end]) for begin, end in self._cuts()]
        steps = []
        for (begin, end), result in zip(self._cuts(), found, strict=True):
            assert result.hit_blocks == end - begin, f"{result}, asked for {end - begin}"
            assert result.lease_id is not None
            self._number += 1
            cell = self.tickets.allocate(self._number)
            assert cell is not None
            work = LoadWork(
                job_id=self._number,
                generation=generation,
                ticket_cell=cell,
                bell=self.tickets.bell,
                lease_id=result.lease_id,
                skip_blocks=0,
                block_ids=self._block_ids(begin, end),
                deadline_s=time.monotonic() + _WAIT_S,
            )
            steps.append((Step(loads=(work,)), cell))
        return self._run(steps)

    def lookup(self, hashes: Sequence[bytes], pause_s: float = 20e-6) -> LookupResult:
        """One lookup to its end; without a pause the waiting thread keeps the interpreter busy."""
        pending = self.scheduler.start_lookup(self._generation(), 0, tuple(hashes))
        _wait_for(lambda: pending.result is not None, pause_s=pause_s)
        assert pending.result is not None
        return pending.result

    def timed_lookup(self, hashes: Sequence[bytes], pause_s: float) -> tuple[float, LookupResult]:
        """One lookup from the call to the result, in seconds."""
        began_s = time.perf_counter()
        result = self.lookup(hashes, pause_s)
        return time.perf_counter() - began_s, result

    def release(self, result: LookupResult) -> None:
        assert result.lease_id is not None
        self.scheduler.release((result.lease_id,))

    def check_bytes(self, hashes: Sequence[bytes]) -> None:
        """Prove once that what is measured is real: other bytes in between, the same after."""
        expected = hashlib.blake2b(self.pool.buffer).digest()
        self.content[:] = 0
        self.load(hashes)
        assert hashlib.blake2b(self.pool.buffer).digest() == expected, "loaded bytes differ"

    def drop(self) -> None:
        """Make room: nothing that was stored is found any more."""
        assert self.scheduler.reset(_WAIT_S), "the reset was not confirmed"

    def close(self) -> None:
        self.rank.close()
        self.scheduler.close()
        self.tickets.close()
        del self.content
        self.pool.close()

    def _generation(self) -> int:
        generation = self.scheduler.generation
        assert generation is not None, self.scheduler.status
        return generation

    def _cuts(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.shape.blocks, self.shape.job_blocks):
            yield begin, min(begin + self.shape.job_blocks, self.shape.blocks)

    def _block_ids(self, begin: int, end: int) -> tuple[int, ...]:
        return tuple(int(place) for place in self._places[begin:end])

    def _run(self, steps: list[tuple[Step, int]]) -> float:
        """Hand the steps over, a few at a time, and wait for all completions."""
        waiting = list(reversed(steps))
        in_flight = 0
        began_s = time.perf_counter()
        while waiting or in_flight:
            while waiting and in_flight < JOBS_IN_FLIGHT:
                self.rank.hand_over(waiting.pop()[0])
                in_flight += 1
            done = self.rank.drain()
            for store in done.stores:
                assert store.stored > 0, store
                assert (store.rejected, store.failed) == ((), ()), store
            for load in done.loads:
                assert load.reason is None, load
            in_flight -= len(done.stores) + len(done.loads)
            if not done.stores and not done.loads:
                select.select([], [], [], 0.0002)
        took_s = time.perf_counter() - began_s
        for _, cell in steps:
            self.tickets.free(cell)
        return took_s


def _wait_for(condition: Callable[[], bool], pause_s: float = 0.005) -> None:
    ends_s = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, "not in time"
        select.select([], [], [], pause_s)

"""The services on a real core and a real arena, with a copier whose batches a test ends.

No process, no socket, and a clock that only the test moves. Must be made within a running
asyncio loop.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from kvoffd.arena.arena import Arena, ArenaOptions
from kvoffd.copier.frames import BatchEnd, LoadBatch, Outcome, StoreBatch
from kvoffd.core.cache import Cache
from kvoffd.core.policy.lru import LruPolicy
from kvoffd.core.types import CacheOptions
from kvoffd.devices.base import Region
from kvoffd.service.copiers import Copiers
from kvoffd.service.fence import FenceService
from kvoffd.service.instances import Instances, Registration
from kvoffd.service.janitor import Janitor
from kvoffd.service.load import LoadService
from kvoffd.service.lookup import LookupService
from kvoffd.service.namespaces import Namespaces
from kvoffd.service.options import ServiceOptions
from kvoffd.service.pools import RankDescription
from kvoffd.service.seats import LoadRequest, StoreRequest
from kvoffd.service.sessions import CloseCode, Memory, MemoryKind, Peer, Role, Session, Sessions
from kvoffd.service.store import StoreService
from kvoffd.service.streams import LoadStatus, RankStream, StoreOutcome
from kvoffd.service.transfer import Step, TransferService

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffd.copier.supervisor import CopierEvents
    from kvoffd.core.types import InstanceKey
    from kvoffd.devices.base import PoolDescription
    from kvoffd.errors import KvoffdError
    from kvoffd.service.instances import Instance
    from kvoffd.service.seats import Seat

BLOCK_BYTES = 4096
EXTENT_BYTES = 16 * BLOCK_BYTES
POOL_BLOCKS = 32
CELLS = 64


class FakeCopier:
    """Keeps batches until the test ends them; ends those of a pool that is closed."""

    def __init__(self, device: str, events: CopierEvents) -> None:
        self.device = device
        self.state = "up"
        self.incarnation = 1
        self.pid = 0
        self.pidfd: int | None = 0
        self.restarts = self.store_bytes = self.load_bytes = 0
        self.batches: dict[int, StoreBatch | LoadBatch] = {}
        self.cancelled: set[int] = set()
        self.pools: set[int] = set()
        self.killed: list[str] = []
        self.refusal: KvoffdError | None = None
        self._events = events
        self._pool_ids = 0

    @property
    def batches_in_flight(self) -> int:
        return len(self.batches)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def open_pool(self, pool: PoolDescription, fds: Sequence[int]) -> int:
        pool.check()
        assert all(os.fstat(fd) for fd in fds)
        if self.refusal is not None:
            raise self.refusal
        self._pool_ids += 1
        self.pools.add(self._pool_ids)
        return self._pool_ids

    async def close_pool(self, pool_id: int) -> None:
        for batch_id in [b for b, batch in self.batches.items() if batch.pool_id == pool_id]:
            self.end(batch_id, Outcome.CANCELLED)
        self.pools.remove(pool_id)

    def submit_store(self, batch: StoreBatch) -> None:
        self._submit(batch)

    def submit_load(self, batch: LoadBatch) -> None:
        self._submit(batch)

    def _submit(self, batch: StoreBatch | LoadBatch) -> None:
        assert batch.pool_id in self.pools, "a batch for a pool that is not open"
        assert batch.batch_id not in self.batches
        self.batches[batch.batch_id] = batch

    def cancel(self, batch_id: int) -> None:
        if batch_id in self.batches:
            self.cancelled.add(batch_id)

    def kill(self, reason: str) -> None:
        self.killed.append(reason)

    def end(self, batch_id: int, outcome: Outcome = Outcome.COPIED) -> None:
        del self.batches[batch_id]
        self.cancelled.discard(batch_id)
        self._events.batch_ended(BatchEnd(batch_id=batch_id, outcome=outcome))

    def end_all(self, outcome: Outcome = Outcome.COPIED) -> None:
        """All there are, and all that follow from them."""
        while self.batches:
            self.end(next(iter(self.batches)), outcome)

    def restart(self) -> None:
        """Die with everything, and come back as another process."""
        self.state = "restarting"
        self._events.copier_died(self.incarnation, "killed by the test")
        for batch_id in tuple(self.batches):
            self.end(batch_id, Outcome.FAILED)
        self.incarnation += 1
        self._events.copier_up(self.incarnation, 0)
        self.state = "up"


class FakeLink:
    """Remembers what a session's client would have been told."""

    def __init__(self) -> None:
        self.copiers: list[int] = []
        self.closed: tuple[CloseCode | None, str] | None = None

    def copier_up(self, incarnation: int, pidfd: int) -> None:
        del pidfd
        self.copiers.append(incarnation)

    def close(self, code: CloseCode | None, reason: str) -> None:
        self.closed = (code, reason)


class Member:
    """One registered rank with its stream, and the outcomes that came by it."""

    def __init__(self, world: World, session: Session) -> None:
        self.world = world
        self.session = session
        self.generation = 1
        self.stream: RankStream = RankStream(0)
        self.stores: dict[int, StoreOutcome] = {}
        self.loads: dict[int, LoadStatus] = {}

    @property
    def seat(self) -> Seat:
        return self.world.instances.seat(self.session)

    def open_stream(self, epoch: int) -> None:
        self.stream = self.world.transfers.open_stream(self.seat, epoch)

    def store(self, job_id: int, numbers: Sequence[int], **changes: Any) -> None:
        fields = {
            "job_id": job_id,
            "generation": self.generation,
            "group": 0,
            "ticket_cell": job_id % CELLS,
            "bell": 0,
            "parent_hash": b"",
            "hashes": [number.to_bytes(8, "little") for number in numbers],
            "block_ids": list(range(len(numbers))),
        }
        step = Step([StoreRequest(**(fields | changes))], [], [])
        self.world.transfers.step(self.seat, self.stream, step)

    def load(self, job_id: int, lease_id: int, blocks: int, **changes: Any) -> None:
        fields = {
            "job_id": job_id,
            "generation": self.generation,
            "ticket_cell": job_id % CELLS,
            "bell": 0,
            "lease_id": lease_id,
            "skip_blocks": 0,
            "block_ids": list(range(blocks)),
            "deadline_s": 5.0,
        }
        step = Step([], [LoadRequest(**(fields | changes))], [])
        self.world.transfers.step(self.seat, self.stream, step)

    def revoke(self, *job_ids: int) -> None:
        self.world.transfers.step(self.seat, self.stream, Step([], [], list(job_ids)))

    async def collect(self) -> None:
        """Take the outcomes that are there."""
        if self.stream.outcomes_waiting or self.stream.close_reason is not None:
            outcomes = await self.stream.take()
            if outcomes is None:
                return
            for store in outcomes.stores:
                assert store.job_id not in self.stores, "one outcome a job"
                self.stores[store.job_id] = store
            for load in outcomes.loads:
                assert load.job_id not in self.loads, "one outcome a job"
                self.loads[load.job_id] = load.status


class World:
    """All services of one daemon."""

    def __init__(self, **limits: Any) -> None:
        self.now_s = 100.0
        self.options = ServiceOptions(**({"check_invariants": True} | limits))
        self.cache = Cache(
            CacheOptions(
                extents_total=4,
                extent_bytes=EXTENT_BYTES,
                slot_align_bytes=BLOCK_BYTES,
                lease_ttl_s=self.options.lease_ttl_s,
                store_deadline_s=self.options.store_deadline_s,
                leases_max=self.options.leases_max,
                open_jobs_max=self.options.open_jobs_max,
            ),
            LruPolicy(),
        )
        self.arena = Arena.create(ArenaOptions(4, EXTENT_BYTES, BLOCK_BYTES))
        made: Any = FakeCopier
        self.copiers = Copiers(["cpu:0"], made)
        self.copier: Any = self.copiers.get("cpu:0")
        self.sessions = Sessions(self.options)
        self.stores = StoreService(self.cache, self.arena, self.copiers, self._find, self.clock)
        apply = self.stores.apply
        self.namespaces = Namespaces(
            self.cache, self.arena, apply, self.options.namespaces_max, self.clock
        )
        self.instances = Instances(
            self.options, self.sessions, self.namespaces, self.copiers, self.clock
        )
        self.loads = LoadService(self.cache, self.copiers, apply, self.options, self.clock)
        self.instances.rank_lost += [self.loads.rank_lost, self.stores.rank_lost]
        self.instances.ended.append(self.stores.instance_ended)
        self.transfers = TransferService(
            self.stores,
            self.loads,
            FenceService(self.stores, self.loads),
            self.namespaces,
            self.options,
        )
        self.lookups = LookupService(self.cache, self.instances, self.namespaces, apply, self.clock)
        self.janitor = Janitor(self.cache, self.stores, self.loads, self.options, self.clock)
        self._pidfds: list[int] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sessions.close_all(CloseCode.DRAINING, "The test is over.")
        await self.instances.wait_closed()
        self.arena.close()
        for pidfd in self._pidfds:
            os.close(pidfd)

    def _find(self, key: InstanceKey) -> Instance | None:
        return self.instances.get(key)

    def clock(self) -> float:
        return self.now_s

    def session(self, role: Role, pid: int | None = None) -> Session:
        pidfd = os.pidfd_open(os.getpid())
        self._pidfds.append(pidfd)
        peer = Peer(os.geteuid(), os.getegid(), os.getpid() if pid is None else pid)
        return self.sessions.open(role, peer, pidfd, FakeLink())

    def offer(self, session: Session) -> None:
        size_bytes = POOL_BLOCKS * BLOCK_BYTES
        for index, kind, size in (
            (0, MemoryKind.POOL, size_bytes),
            (1, MemoryKind.TICKETS, 4096 + 64 * CELLS),
        ):
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            self.sessions.add_memory(session, Memory(index, kind, size, fd))

    @staticmethod
    def registration(
        name: str, rank: int | None = None, ranks_total: int = 1, namespace: str = "m"
    ) -> Registration:
        description = None
        if rank is not None:
            region = Region(
                group=0,
                memory=0,
                offset_bytes=0,
                block_stride_bytes=BLOCK_BYTES,
                block_bytes=BLOCK_BYTES,
            )
            description = RankDescription(
                rank=rank,
                device="cpu:0",
                ticket_memory_index=1,
                ticket_cells=CELLS,
                pool_blocks=POOL_BLOCKS,
                regions=(region,),
            )
        fields = (("model", namespace), ("ranks", str(ranks_total)))
        return Registration(name, "nonce", fields, ranks_total, description)

    async def member(self, name: str, rank: int = 0, ranks_total: int = 1) -> Member:
        """A rank that has done everything right."""
        session = self.session(Role.RANK)
        self.offer(session)
        registration = self.registration(name, rank, ranks_total)
        await self.instances.register(session, registration)
        self.loads.copier_seen(session, self.copier.incarnation)
        member = Member(self, session)
        member.open_stream(1)
        return member

    async def scheduler(self, name: str, ranks_total: int = 1) -> Session:
        session = self.session(Role.SCHEDULER)
        await self.instances.register(session, self.registration(name, None, ranks_total))
        return session

    def lookup(self, scheduler: Session, numbers: Sequence[int], generation: int = 1) -> Any:
        hashes = [number.to_bytes(8, "little") for number in numbers]
        return self.lookups.lookup(scheduler, generation, 0, hashes)

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and check everything."""
        self.now_s += seconds
        self.janitor.turn()

    def assert_quiet(self) -> None:
        """Nothing is in flight, and every block is accounted for."""
        statistics = self.cache.statistics()
        assert statistics.blocks_pending == 0
        assert statistics.slots_quarantined == 0
        assert statistics.loads_in_flight == 0
        assert self.stores.copies_open == self.loads.loads_open == 0
        assert self.copiers.batches_open == 0
        ledger = self.cache.ledger_total()
        assert ledger.is_conserved, ledger
        assert ledger.in_flight == 0, ledger

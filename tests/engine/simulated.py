"""A daemon of a hundred lines inside the test's own process, for many seeds in little time.

Owns what is stored, and copies between engines' pools on its own schedule: under a seed, jobs
wait, are refused, end late or fail half-way. It keeps the protocol of the ticket page, so the
halves under test are the real ones. One thread; `turn` is called between hooks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvoffd_client.ports import (
    Completions,
    Limits,
    LoadResult,
    LookupResult,
    PendingLookup,
    PendingRenewal,
    Reason,
    ReasonCount,
    SessionState,
    StoreResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffd_client.ports import LoadWork, Step, StoreWork
    from kvoffd_client.tickets import TicketPage
    from tests.engine.pool import Pool

LIMITS = Limits(
    store_blocks_max=16,
    load_blocks_max=4096,
    lookup_blocks_max=4096,
    jobs_in_flight_max=64,
    heartbeat_s=1.0,
    lease_ttl_s=10.0,
    memories_max=16,
)
# Words of a ticket cell, by the protocol (docs/protocol.md).
_CELL_WORD0, _CELL_WORDS = 512, 8
_STARTED, _DONE, _GIVEN_UP = 1, 2, 3


@dataclass
class _Namespace:
    generation: int = 1
    #: hash -> rank -> region -> bytes; READY when every rank is there.
    blocks: dict[bytes, dict[int, list[bytes]]] = field(default_factory=dict)
    ranks: int = 1


@dataclass
class _Job:
    store: StoreWork
    copied: dict[int, list[list[bytes]]] = field(default_factory=dict)
    failed: bool = False


class SimulatedDaemon:
    """What instances share. `blocks_max` bounds a namespace: older blocks are evicted."""

    def __init__(self, seed: int, blocks_max: int = 60, lost: float = 0.04) -> None:
        self.drawn = random.Random(f"simulated {seed}")
        self.blocks_max = blocks_max
        #: How often a connection is lost while its copy goes on.
        self.lost = lost
        self.namespaces: dict[str, _Namespace] = {}
        self.leases: dict[int, tuple[bytes, ...]] = {}
        self.loads_ended: dict[int, int] = {}
        self.lease_number = 0

    def namespace(self, name: str, ranks: int) -> _Namespace:
        return self.namespaces.setdefault(name, _Namespace(ranks=ranks))


class SimulatedScheduler:
    """A SchedulerPort. Answers lookups a few turns later."""

    state = SessionState.UP
    limits = LIMITS
    accepting = True
    instance_complete = True

    def __init__(self, daemon: SimulatedDaemon, name: str, ranks: int, clock: Any) -> None:
        self._daemon = daemon
        self._clock = clock
        self._asked: list[tuple[PendingLookup, int, tuple[bytes, ...]]] = []
        self._space = daemon.namespace(name, ranks)
        self.generation = self._space.generation

    def start_lookup(
        self, generation: int, group: int, block_hashes: tuple[bytes, ...]
    ) -> PendingLookup:
        assert group == 0
        pending = PendingLookup(self._abandon)
        self._asked.append((pending, generation, block_hashes))
        return pending

    def renew(self, lease_id: int) -> PendingRenewal:
        pending = PendingRenewal()
        if lease_id in self._daemon.leases:
            pending.lease_deadline_s = self._clock() + LIMITS.lease_ttl_s
        return pending

    def release(self, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            self._daemon.leases.pop(lease_id, None)

    def reset(self, timeout_s: float = 1.0) -> bool:
        assert timeout_s <= 1.0
        self._space.generation += 1
        self._space.blocks.clear()
        self.generation = self._space.generation
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        del timeout_s

    def turn(self) -> None:
        """Answer some of what is asked."""
        for asked in list(self._asked):
            if self._daemon.drawn.random() < 0.6:
                self._asked.remove(asked)
                self._answer(*asked)

    def _answer(self, pending: PendingLookup, generation: int, hashes: tuple[bytes, ...]) -> None:
        hits: list[bytes] = []
        if generation == self._space.generation:
            for block_hash in hashes:
                if len(self._space.blocks.get(block_hash, ())) < self._space.ranks:
                    break
                hits.append(block_hash)
        if not hits:
            pending.result = LookupResult()
            return
        self._daemon.lease_number += 1
        lease_id = self._daemon.lease_number
        self._daemon.leases[lease_id] = tuple(hits)
        deadline_s = self._clock() + LIMITS.lease_ttl_s
        pending.result = LookupResult(len(hits), lease_id, deadline_s)

    def _abandon(self, pending: PendingLookup) -> None:
        self._asked = [asked for asked in self._asked if asked[0] is not pending]
        if pending.result is not None and pending.result.lease_id is not None:
            self.release((pending.result.lease_id,))


class SimulatedRank:
    """A RankPort over one pool. Each job ends once, some turns later, in any order."""

    state = SessionState.UP
    limits = LIMITS

    def __init__(
        self, daemon: SimulatedDaemon, name: str, ranks: int, pool: Pool, tickets: TicketPage
    ) -> None:
        self._daemon = daemon
        self._space = daemon.namespace(name, ranks)
        self._pool = pool
        self._tickets = tickets
        self._words = memoryview(tickets.memory.buffer).cast("Q")
        self._stores: list[StoreWork] = []
        self._loads: list[LoadWork] = []
        self._ghosts: list[StoreWork] = []
        self._begun: set[int] = set()
        self._leased: dict[int, tuple[bytes, ...]] = {}
        self._store_results: list[StoreResult] = []
        self._load_results: list[LoadResult] = []
        #: Filled in by the instance: the shared table of jobs by id, one for all its ranks.
        self.jobs: dict[int, _Job] = {}

    def hand_over(self, step: Step) -> None:
        for store in step.stores:
            if self._daemon.drawn.random() < self._daemon.lost / 2:
                count = (ReasonCount(Reason.NOT_CONNECTED, len(store.block_ids)),)
                self._store_results.append(
                    StoreResult(store.job_id, failed=count, from_daemon=False)
                )
                continue
            self._stores.append(store)
            self.jobs.setdefault(store.job_id, _Job(store))
        self._loads += step.loads

    def drain(self) -> Completions:
        stores, self._store_results = tuple(self._store_results), []
        loads, self._load_results = tuple(self._load_results), []
        return Completions(stores, loads)

    def copier_gone(self, ticket_cell: int, incarnation: int) -> bool:
        del ticket_cell, incarnation
        return False

    def close(self, timeout_s: float = 1.0) -> None:
        del timeout_s
        self._words.release()

    def turn(self) -> None:
        """Some jobs get on; a job whose bell has not rung does not."""
        drawn = self._daemon.drawn
        for store in list(self._stores):
            if store.bell <= self._tickets.bell and drawn.random() < 0.4:
                self._stores.remove(store)
                self._end_store(store)
        for store in [one for one in self._ghosts if drawn.random() < 0.3]:
            self._ghosts.remove(store)
            self._copy_store(store)
        for load in list(self._loads):
            if load.bell <= self._tickets.bell and drawn.random() < 0.4:
                self._move_load(load)

    def _word(self, cell: int) -> int:
        return _CELL_WORD0 + _CELL_WORDS * cell

    def _is_mine(self, job_id: int, cell: int) -> bool:
        word = self._word(cell)
        return bool(self._words[word] == job_id and self._words[word + 1] == 0)

    def _end_store(self, store: StoreWork) -> None:
        """One result; a store whose connection was lost is told at once and copied later."""
        if self._daemon.drawn.random() < self._daemon.lost:
            blocks = len(store.block_ids)
            failed = (ReasonCount(Reason.CONNECTION_LOST, blocks),)
            self._store_results.append(StoreResult(store.job_id, failed=failed, from_daemon=False))
            self._ghosts.append(store)
            return
        self._store_results.append(self._copy_store(store))

    def _copy_store(self, store: StoreWork) -> StoreResult:
        """Copy, then read the ticket: the order that a fence relies on."""
        job = self.jobs[store.job_id]
        blocks = len(store.block_ids)
        copied = [self._pool.read_block(block) for block in store.block_ids]
        if self._daemon.drawn.random() < 0.05:
            job.failed = True
        if not self._is_mine(store.job_id, store.ticket_cell):
            job.failed = True
        if store.generation != self._space.generation:
            rejected = (ReasonCount(Reason.STALE_GENERATION, blocks),)
            return StoreResult(store.job_id, rejected=rejected)
        if job.failed:
            return StoreResult(store.job_id, failed=(ReasonCount(Reason.REVOKED, blocks),))
        job.copied[self._pool.rank] = copied
        if len(job.copied) == self._space.ranks:
            self._seal(job)
        # This simulation tells a rank of its own copy; the real daemon waits for the seal.
        return StoreResult(store.job_id, stored=blocks)

    def _seal(self, job: _Job) -> None:
        for index, block_hash in enumerate(job.store.block_hashes):
            shards = {rank: copied[index] for rank, copied in job.copied.items()}
            self._space.blocks.setdefault(block_hash, shards)
        leased = {one for hashes in self._daemon.leases.values() for one in hashes}
        for block_hash in list(self._space.blocks):
            if len(self._space.blocks) <= self._daemon.blocks_max:
                return
            if block_hash not in leased:
                del self._space.blocks[block_hash]

    def _move_load(self, load: LoadWork) -> None:
        """One stage of a load: begin it, or end it."""
        cell = self._word(load.ticket_cell)
        if load.job_id not in self._begun:
            reason = self._refusal(load)
            if reason is not None:
                self._loads.remove(load)
                self._load_results.append(LoadResult(load.job_id, reason))
                return
            # From here on the load has its own hold.
            self._leased[load.lease_id] = self._daemon.leases[load.lease_id]
            self._begun.add(load.job_id)
            return
        self._loads.remove(load)
        hashes = self._end_lease(load.lease_id)
        if not self._is_mine(load.job_id, load.ticket_cell):
            self._load_results.append(LoadResult(load.job_id, Reason.REVOKED))
            return
        wanted = hashes[load.skip_blocks : load.skip_blocks + len(load.block_ids)]
        half_way = self._daemon.drawn.random() < 0.1
        self._words[cell + 3] = 1
        self._words[cell + 2] = _STARTED
        for block, block_hash in zip(load.block_ids, wanted, strict=True):
            shards = self._space.blocks.get(block_hash)
            if shards is None or (half_way and block == load.block_ids[-1]):
                self._words[cell + 2] = _GIVEN_UP
                self._load_results.append(LoadResult(load.job_id, Reason.COPIER))
                return
            self._pool.put_block(block, shards[self._pool.rank])
        self._words[cell + 2] = _DONE
        moved = load.generation != self._space.generation
        reason = Reason.STALE_GENERATION if moved else None
        self._load_results.append(LoadResult(load.job_id, reason))

    def _end_lease(self, lease_id: int) -> tuple[bytes, ...]:
        """The last rank's load ends the lease; until then each finds it, released or not."""
        hashes = self._leased[lease_id]
        ended = self._daemon.loads_ended.get(lease_id, 0) + 1
        self._daemon.loads_ended[lease_id] = ended
        if ended == self._space.ranks:
            self._daemon.leases.pop(lease_id, None)
        return hashes

    def _refusal(self, load: LoadWork) -> Reason | None:
        if load.generation != self._space.generation:
            return Reason.STALE_GENERATION
        if load.lease_id not in self._daemon.leases or self._daemon.drawn.random() < 0.05:
            return Reason.LEASE_NOT_FOUND
        return None

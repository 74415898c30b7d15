"""What a cache must do, without knowing how: a slot table and slot bytes, kept by hand.

The oracle carries out every Effects as the daemon would. Copies take time: a slot is
torn from the plan until the copy ends, and only the driver says when that is. So a slot
that is given out, freed or found too early shows as a wrong byte or a wrong record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffd.core.types import BlockKey, CacheOptions

if TYPE_CHECKING:
    from kvoffd.core.cache import Cache
    from kvoffd.core.plans import Effects, JobSettled, StorePlan
    from kvoffd.core.types import (
        InstanceKey,
        JobRef,
        LeaseId,
        LoadId,
        NamespaceId,
        SlotId,
        SlotRecord,
        StoreId,
    )

OPTIONS = CacheOptions(
    extents_total=3,
    extent_bytes=1024,
    slot_align_bytes=64,
    lease_ttl_s=10.0,
    store_deadline_s=30.0,
    leases_max=6,
    open_jobs_max=200,
)
STRIDE = OPTIONS.extent_bytes // OPTIONS.slot_align_bytes
TORN = "torn"


@dataclass
class ModelJob:
    """A job as its engine knows it."""

    ref: JobRef
    namespace: NamespaceId
    generation: int
    group: int
    parent: bytes | None
    hashes: tuple[bytes, ...]
    ranks_total: int
    begun: set[int] = field(default_factory=set)
    settled: dict[int, JobSettled] = field(default_factory=dict)
    #: Its source blocks were reused, or its engine is gone: its copies carry garbage.
    revoked: bool = False
    dropped: bool = False

    def keys(self) -> list[BlockKey]:
        return [BlockKey(self.namespace, self.group, block_hash) for block_hash in self.hashes]


@dataclass
class ModelLease:
    """A lease as its holder knows it."""

    lease_id: LeaseId
    instance: InstanceKey
    generation: int
    keys: list[BlockKey]
    ranks_total: int
    deadline_s: float
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


@dataclass
class ModelLoad:
    """One rank's copies that are reading slots."""

    load_id: LoadId
    lease: ModelLease
    rank: int
    keys: list[BlockKey]
    slots: tuple[SlotId, ...]


class Oracle:
    """The model, and the rules that every Effects is held to."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.generations: dict[NamespaceId, int] = {}
        self.slot_bytes: dict[tuple[NamespaceId, int], int] = {}
        self.jobs: dict[JobRef, ModelJob] = {}
        self.stores: dict[StoreId, StorePlan] = {}
        self.cancelled: set[StoreId] = set()
        self.leases: dict[LeaseId, ModelLease] = {}
        self.loads: dict[LoadId, ModelLoad] = {}
        self.content: dict[SlotId, object] = {}
        self.records: dict[SlotId, SlotRecord] = {}
        self.classes: dict[int, int] = {}
        #: By slot in state READY, and by block that can be found: the sequence it has.
        self.ready_slots: dict[SlotId, SlotRecord] = {}
        self.ready: dict[BlockKey, int] = {}
        self.writers: dict[int, JobRef] = {}
        self.submitted = 0
        self.stored = 0

    def truth(self, key: BlockKey, rank: int) -> object:
        """The bytes that a shard must have now."""
        return (key, rank, self.generations[key.namespace])

    def apply(self, effects: Effects, own: tuple[BlockKey, ...] = ()) -> None:
        """Carry effects out; `own` are the blocks that the call may not evict."""
        evicted = self._apply_freed(effects)
        for extent, slot_bytes in effects.extents:
            self.classes[extent] = slot_bytes
            used = [slot for slot in self.records if slot // STRIDE == extent]
            assert not used, f"extent {extent} changes its class under slots {used}"
        self._apply_ready(effects)
        for plan in effects.stores:
            self._apply_store(plan)
        self._check_evictions(evicted, own)
        for store_id in effects.cancelled:
            assert store_id in self.stores, f"cancelled store {store_id} is not open"
            assert store_id not in self.cancelled, f"store {store_id} is cancelled twice"
            self.cancelled.add(store_id)
        for settled in effects.settled:
            self._apply_settled(settled)
        for lease_id in effects.expired_leases:
            del self.leases[lease_id]

    def _apply_freed(self, effects: Effects) -> set[BlockKey]:
        evicted: set[BlockKey] = set()
        writing = {w.record.slot for plan in self.stores.values() for w in plan.writes}
        reading = {slot for load in self.loads.values() for slot in load.slots}
        assert len(set(effects.freed)) == len(effects.freed), "a slot is freed twice in one call"
        for slot in effects.freed:
            assert slot not in writing, f"slot {slot} is freed while a copy writes it"
            assert slot not in reading, f"slot {slot} is freed while a copy reads it"
            self.records.pop(slot, None)
            record = self.ready_slots.pop(slot, None)
            if record is not None and self.ready.get(record.key) == record.sequence:
                evicted.add(record.key)
        for key in evicted:
            del self.ready[key]
        return evicted

    def _apply_ready(self, effects: Effects) -> None:
        sealed: dict[int, list[SlotRecord]] = {}
        for slot in effects.ready:
            record = self.records[slot]
            sealed.setdefault(record.sequence, []).append(record)
            assert slot not in self.ready_slots, f"slot {slot} becomes ready twice"
            expected = self.truth(record.key, record.rank)
            assert self.content[slot] == expected, f"{record} holds {self.content[slot]}"
            self.ready_slots[slot] = record
        for sequence, records in sealed.items():
            job = self.jobs[self.writers[sequence]]
            assert not job.revoked, f"{job.ref} was revoked, and {records[0].key} is ready"
            ranks = sorted(record.rank for record in records)
            assert ranks == list(range(job.ranks_total)), f"ready with ranks {ranks}"
            assert {record.generation for record in records} == {job.generation}
            assert records[0].key not in self.ready, f"{records[0].key} is ready twice"
            self.ready[records[0].key] = sequence

    def _apply_store(self, plan: StorePlan) -> None:
        job = self.jobs[plan.job]
        assert plan.store_id not in self.stores
        assert plan.rank in job.begun, f"{plan} for a rank that has not begun"
        assert not job.revoked, f"{plan} for a job that was revoked"
        assert plan.writes, f"{plan} is empty"
        reading = {slot for load in self.loads.values() for slot in load.slots}
        for write in plan.writes:
            record = write.record
            slot = record.slot
            assert slot not in self.records, f"{record} over {self.records[slot]}"
            assert slot not in reading, f"{record} while a copy reads the slot"
            assert record.key == job.keys()[write.block]
            assert record.rank == plan.rank
            assert record.generation == self.generations[record.key.namespace]
            assert self.writers.setdefault(record.sequence, plan.job) == plan.job
            slot_bytes = self.slot_bytes[record.key.namespace, record.key.group]
            assert self.classes[slot // STRIDE] == slot_bytes
            offset_bytes = slot // STRIDE * OPTIONS.extent_bytes + slot % STRIDE * slot_bytes
            assert self.cache.slot_offset_bytes(slot) == offset_bytes
            assert slot % STRIDE * slot_bytes + slot_bytes <= OPTIONS.extent_bytes
            assert 0 < record.length_bytes <= slot_bytes
            self.records[slot] = record
            self.content[slot] = TORN
        self.stores[plan.store_id] = plan

    def _check_evictions(self, evicted: set[BlockKey], own: tuple[BlockKey, ...]) -> None:
        """A tail goes before its head; what is leased, loaded or the call's own stays."""
        for key in evicted:
            assert key not in own, f"{key} is evicted by a call of its own"
        for key in self.ready:
            parent = key._replace(block_hash=key.block_hash[:-1])
            assert parent not in evicted, f"{parent} is evicted before its tail {key}"
        for lease in self.leases.values():
            if lease.generation == self.generations[lease.keys[0].namespace]:
                assert evicted.isdisjoint(lease.keys), f"evicted from lease {lease.lease_id}"
        for load in self.loads.values():
            if load.lease.generation == self.generations[load.keys[0].namespace]:
                assert evicted.isdisjoint(load.keys), f"evicted under load {load.load_id}"

    def _apply_settled(self, settled: JobSettled) -> None:
        job = self.jobs[settled.job]
        blocks = settled.stored + settled.present + sum(count for _, count in settled.unstored)
        assert blocks == len(job.hashes), f"{settled} of {len(job.hashes)} blocks"
        assert settled.rank in job.begun, f"{settled} to a rank that has not begun"
        assert settled.rank not in job.settled, f"{settled} is said twice"
        for other in job.settled.values():
            assert _verdict(other) == _verdict(settled), f"{other} and {settled} differ"
        job.settled[settled.rank] = settled
        self.stored += settled.stored

    def begin(self, job: ModelJob, rank: int, now_s: float) -> None:
        """A rank begins a job."""
        extents_free = OPTIONS.extents_total - self.cache.statistics().extents_used
        before = dict(self.ready)
        job.begun.add(rank)
        self.submitted += len(job.hashes)
        effects = self.cache.begin_store(
            job.ref,
            rank,
            job.namespace,
            job.generation,
            job.group,
            job.parent,
            job.hashes,
            now_s,
        )
        parent = () if job.parent is None else (BlockKey(job.namespace, job.group, job.parent),)
        self.apply(effects, (*job.keys(), *parent))
        reasons = {reason.value for s in effects.settled for reason, _ in s.unstored}
        if "no_slot" in reasons and not effects.stores and len(job.begun) == 1:
            assert self.ready == before, "a job that found no room has evicted blocks"
            slot_bytes = self.slot_bytes[job.namespace, job.group]
            room = extents_free * (OPTIONS.extent_bytes // slot_bytes)
            assert room < job.ranks_total, f"no slot, with {extents_free} extents unused"

    def end_copy(self, store_id: StoreId, well: bool) -> StorePlan:
        """A copy has really ended. One that was revoked has read somebody else's bytes."""
        plan = self.stores.pop(store_id)
        job = self.jobs[plan.job]
        if well:
            for write in plan.writes:
                key = write.record.key
                right = (key, plan.rank, job.generation)
                self.content[write.record.slot] = "garbage" if job.revoked else right
        return plan

    def forget_generation(self, namespace: NamespaceId) -> None:
        """The namespace was reset: none of its blocks may be found."""
        self.ready = {key: seq for key, seq in self.ready.items() if key.namespace != namespace}
        for job in self.jobs.values():
            if job.namespace == namespace and job.settled.keys() != job.begun:
                job.revoked = True

    def prefix(self, keys: list[BlockKey]) -> int:
        """Leading blocks that must be found."""
        hits = 0
        for key in keys:
            if key not in self.ready:
                break
            hits += 1
        return hits


def _verdict(settled: JobSettled) -> tuple[int, int, dict[str, int]]:
    return (
        settled.stored,
        settled.present,
        {reason.value: blocks for reason, blocks in settled.unstored},
    )

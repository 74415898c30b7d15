"""A hypothesis state machine over the door of the core, judged by the oracle.

Two instances (each may die and come again), two namespaces of three and two ranks with
slots of two sizes, and room for a dozen blocks: so that almost every step meets eviction,
waiting, or a copy that outlives what allowed it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar

import pytest
from core.cache_oracle import OPTIONS, ModelJob, ModelLease, ModelLoad, Oracle
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffd import errors
from kvoffd.core.cache import Cache
from kvoffd.core.policy.lru import LruPolicy
from kvoffd.core.types import (
    BlockKey,
    InstanceKey,
    JobRef,
    LeaseId,
    LoadId,
    StoreId,
    UnstoredReason,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffd.core.policy.base import Policy

# Namespace digest, ranks, bytes of a shard by group: slots of 128 and of 256 bytes.
NAMESPACES = ((b"three", 3, {0: 100, 1: 256}), (b"two", 2, {0: 250, 1: 128}))
PICK = st.integers(0, 5)
RANK = st.integers(0, 2)
PATH = st.text("ab", min_size=1, max_size=4)


class CacheMachine(RuleBasedStateMachine):
    """Subclasses seed a fault by another cache type or policy type."""

    cache_type: ClassVar[type[Cache]] = Cache
    policy_type: ClassVar[type[Policy]] = LruPolicy
    #: False: the oracle alone must see what is wrong.
    checks_invariants: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.cache = self.cache_type(OPTIONS, self.policy_type())
        self.oracle = Oracle(self.cache)
        self.namespaces = []
        for digest, ranks_total, shard_bytes in NAMESPACES:
            view = self.cache.register_namespace(digest, ranks_total, shard_bytes)
            self.namespaces.append(view)
            self.oracle.generations[view.namespace] = view.generation
            for group, size in shard_bytes.items():
                self.oracle.slot_bytes[view.namespace, group] = -(-size // 64) * 64
        self.births = 2
        self.instances = [InstanceKey("engine-0"), InstanceKey("engine-1")]
        self.job_ids = 0

    def open_jobs(self) -> list[ModelJob]:
        return [
            job
            for job in self.oracle.jobs.values()
            if len(job.begun) < job.ranks_total and not job.dropped
        ]

    # Stores

    @rule(who=PICK, where=PICK, group=PICK, path=PATH, start=PICK, rank=RANK, stale=PICK)
    def begin_job(self, who, where, group, path, start, rank, stale):
        """A rank begins a job that no other rank has begun; one in six is of an old generation."""
        view = pick(self.namespaces, where)
        start %= len(path)
        self.job_ids += 1
        job = ModelJob(
            JobRef(pick(self.instances, who), self.job_ids),
            view.namespace,
            self.oracle.generations[view.namespace] - (stale == 5),
            group % 2,
            path[:start].encode() or None,
            tuple(path[: end + 1].encode() for end in range(start, len(path))),
            view.ranks_total,
        )
        self.oracle.jobs[job.ref] = job
        self.oracle.begin(job, rank % view.ranks_total, self.now_s)

    @rule(who=PICK, where=PICK, group=PICK, path=st.text("ab", min_size=3, max_size=4))
    def store_prefix(self, who, where, group, path):
        """All ranks begin a job, and its copies end well before anything else happens."""
        self.begin_job(who, where, group, path, 0, 0, 0)
        job = self.oracle.jobs[max(self.oracle.jobs, key=lambda ref: ref.job_id)]
        for rank in range(1, job.ranks_total):
            self.oracle.begin(job, rank, self.now_s)
        for store_id, plan in list(self.oracle.stores.items()):
            if plan.job == job.ref:
                self.end_store(store_id)

    @precondition(lambda self: self.oracle.stores)
    @rule(who=PICK, which=PICK, rank=RANK)
    def begin_rival(self, who, which, rank):
        """A job for blocks that another job is writing just now."""
        rival = self.oracle.jobs[pick(list(self.oracle.stores.values()), which).job]
        where = [view.namespace for view in self.namespaces].index(rival.namespace)
        path = rival.hashes[-1].decode()
        self.begin_job(who, where, rival.group, path, len(path) - len(rival.hashes), rank, 0)

    @precondition(lambda self: self.open_jobs())
    @rule(which=PICK, rank=RANK)
    def join_job(self, which, rank):
        """Another rank begins it."""
        job = pick(list(reversed(self.open_jobs())), which)
        missing = [r for r in range(job.ranks_total) if r not in job.begun]
        self.oracle.begin(job, pick(missing, rank), self.now_s)

    @precondition(lambda self: self.open_jobs())
    @rule(which=PICK)
    def join_all(self, which):
        """All other ranks begin it."""
        job = pick(list(reversed(self.open_jobs())), which)
        while len(job.begun) < job.ranks_total:
            self.join_first(job)

    def join_first(self, job):
        missing = [rank for rank in range(job.ranks_total) if rank not in job.begun]
        self.oracle.begin(job, missing[0], self.now_s)

    def end_all(self):
        while self.oracle.stores:
            self.end_store(min(self.oracle.stores))

    @precondition(lambda self: self.oracle.stores)
    @rule(which=PICK)
    def commit(self, which):
        """A copy ends well, also one that nobody wants any more."""
        self.end_store(pick(list(self.oracle.stores), which))

    @precondition(lambda self: self.oracle.stores)
    @rule()
    def commit_all(self):
        """All copies end well, the newest first."""
        for store_id in sorted(self.oracle.stores, reverse=True):
            self.end_store(store_id)

    def end_store(self, store_id):
        self.oracle.end_copy(store_id, well=True)
        self.oracle.apply(self.cache.commit_store(store_id, self.now_s))
        self.oracle.cancelled.discard(store_id)

    @precondition(lambda self: self.oracle.stores)
    @rule(which=PICK, reason=st.sampled_from([UnstoredReason.COPIER, UnstoredReason.RANK_LOST]))
    def abort(self, which, reason):
        """A copy ends badly."""
        store_id = pick(list(self.oracle.stores), which)
        self.oracle.end_copy(store_id, well=False)
        self.oracle.apply(self.cache.abort_store(store_id, reason, self.now_s))
        self.oracle.cancelled.discard(store_id)

    @precondition(lambda self: self.oracle.jobs)
    @rule(which=PICK)
    def revoke(self, which):
        """The engine takes the source blocks of a job back."""
        job = pick(list(reversed(self.oracle.jobs.values())), which)
        job.revoked = True
        self.oracle.apply(self.cache.revoke_job(job.ref, UnstoredReason.REVOKED, self.now_s))
        assert job.settled.keys() == job.begun, f"revoked, and not settled: {job}"

    # Lookups and loads

    @rule(who=PICK, where=PICK, group=PICK, path=PATH)
    def lookup(self, who, where, group, path):
        """The hit is exactly the ready prefix, and no hash behind the first miss is asked for."""
        view = pick(self.namespaces, where)
        generation = self.oracle.generations[view.namespace]
        instance = pick(self.instances, who)
        hashes = [path[: end + 1].encode() for end in range(len(path))]
        keys = [BlockKey(view.namespace, group % 2, block_hash) for block_hash in hashes]
        expected = self.oracle.prefix(keys)
        asked = iter(hashes)
        args = (instance, view.namespace, generation, group % 2, asked, self.now_s)
        if expected and len(self.oracle.leases) == OPTIONS.leases_max:
            with pytest.raises(errors.Overloaded):
                self.cache.lookup(*args)
            return
        result = self.cache.lookup(*args)
        assert result.hit_blocks == expected
        assert len(list(asked)) == max(len(hashes) - expected - 1, 0)
        assert (result.lease_id is None) == (expected == 0)
        if result.lease_id is not None:
            self.oracle.leases[result.lease_id] = ModelLease(
                result.lease_id,
                instance,
                generation,
                keys[:expected],
                view.ranks_total,
                self.now_s + result.lease_ttl_s,
            )

    @precondition(lambda self: self.oracle.ready)
    @rule(who=PICK, which=PICK, rank=RANK, released=st.booleans())
    def load_ready(self, who, which, rank, released):
        """A rank begins to load a prefix that is there; its lease may go before the copy ends."""
        key = pick(sorted(self.oracle.ready), which)
        numbers = [view.namespace for view in self.namespaces]
        where = numbers.index(key.namespace)
        before = set(self.oracle.leases)
        self.lookup(who, where, key.group, key.block_hash.decode())
        for place, lease_id in enumerate(list(self.oracle.leases)):
            if lease_id not in before:
                self.begin_load(place, rank, 0, all_blocks=True)
                if released:
                    self.release(place)

    @precondition(lambda self: self.oracle.leases)
    @rule(which=PICK, rank=RANK, skip=PICK, all_blocks=st.booleans())
    def begin_load(self, which, rank, skip, all_blocks):
        """A rank loads once, only in its generation, and finds its own shards' bytes."""
        lease = pick(list(self.oracle.leases.values()), which)
        namespace = lease.keys[0].namespace
        rank %= lease.ranks_total
        skip %= len(lease.keys)
        blocks = len(lease.keys) - skip if all_blocks else 1
        args = (lease.instance, lease.lease_id, rank, skip, blocks, lease.generation, self.now_s)
        if lease.generation != self.oracle.generations[namespace]:
            with pytest.raises(errors.StaleGeneration):
                self.cache.begin_load(*args)
            return
        if rank in lease.begun:
            with pytest.raises(errors.JobConflict):
                self.cache.begin_load(*args)
            return
        plan = self.cache.begin_load(*args)
        lease.begun.add(rank)
        load = ModelLoad(plan.load_id, lease, rank, lease.keys[skip : skip + blocks], plan.slots)
        assert len(plan.slots) == blocks
        self.check_bytes(load)
        self.oracle.loads[load.load_id] = load

    def check_bytes(self, load):
        for key, slot in zip(load.keys, load.slots, strict=True):
            expected = (key, load.rank, load.lease.generation)
            assert self.oracle.content[slot] == expected, f"{load} reads from slot {slot}"
            assert slot in self.oracle.ready_slots, f"slot {slot} of {load} is not ready"

    @precondition(lambda self: self.oracle.loads)
    @rule(which=PICK, loaded=st.booleans())
    def end_load(self, which, loaded):
        """The bytes were right to the end, whatever happened; good only in its generation."""
        self.finish_load(pick(list(self.oracle.loads), which), loaded=loaded)

    def finish_load(self, load_id, *, loaded):
        load = self.oracle.loads.pop(load_id)
        self.check_bytes(load)
        good, effects = self.cache.end_load(load_id, loaded, self.now_s)
        current = self.oracle.generations[load.keys[0].namespace]
        assert good == (loaded and load.lease.generation == current)
        load.lease.ended.add(load.rank)
        if len(load.lease.ended) == load.lease.ranks_total:
            self.oracle.leases.pop(load.lease.lease_id, None)
        self.oracle.apply(effects)

    @precondition(lambda self: self.oracle.leases)
    @rule(which=PICK)
    def release(self, which):
        """Given back once; another instance cannot."""
        lease = pick(list(self.oracle.leases.values()), which)
        strangers = [name for name in self.instances if name != lease.instance]
        count, effects = self.cache.release(strangers[0], [lease.lease_id], self.now_s)
        assert count == 0
        self.oracle.apply(effects)
        with pytest.raises(errors.LeaseNotFound):
            self.cache.renew(strangers[0], lease.lease_id, self.now_s)
        del self.oracle.leases[lease.lease_id]
        ids = [lease.lease_id, lease.lease_id, LeaseId(10**6)]
        count, effects = self.cache.release(lease.instance, ids, self.now_s)
        assert count == 1
        self.oracle.apply(effects)

    @precondition(lambda self: self.oracle.leases)
    @rule(which=PICK)
    def renew(self, which):
        """The deadline begins anew."""
        lease = pick(list(self.oracle.leases.values()), which)
        ttl_s = self.cache.renew(lease.instance, lease.lease_id, self.now_s)
        lease.deadline_s = self.now_s + ttl_s

    # Time, resets and deaths

    @rule(passed_s=st.sampled_from([1.0, 2.0, 4.0, 11.0, 31.0]))
    def expire(self, passed_s):
        """Time passes; leases and jobs whose deadline it passes are over."""
        self.now_s += passed_s
        overdue = {i for i, le in self.oracle.leases.items() if le.deadline_s < self.now_s}
        effects = self.cache.expire(self.now_s)
        assert set(effects.expired_leases) == overdue
        self.oracle.apply(effects)
        assert overdue.isdisjoint(self.oracle.leases)

    # Resets and deaths are let in where something runs that they cut through.
    @precondition(lambda self: self.oracle.loads or (self.oracle.stores and self.job_ids % 3 == 0))
    @rule(where=PICK)
    def reset(self, where):
        """No block of a namespace is found after its reset, and its jobs are over."""
        namespace = pick(self.namespaces, where).namespace
        ready = sum(key.namespace == namespace for key in self.oracle.ready)
        result = self.cache.reset_namespace(namespace, self.now_s)
        self.oracle.generations[namespace] += 1
        assert result.generation == self.oracle.generations[namespace]
        assert result.blocks_dropped == ready
        self.oracle.forget_generation(namespace)
        self.oracle.apply(result.effects)

    @precondition(lambda self: self.oracle.leases or self.oracle.stores)
    @rule(who=PICK)
    def drop(self, who):
        """An engine dies, and another one starts in its place."""
        place = who % len(self.instances)
        instance = self.instances[place]
        for job in self.oracle.jobs.values():
            if job.ref.instance == instance:
                job.revoked = job.dropped = True
        for lease in [le for le in self.oracle.leases.values() if le.instance == instance]:
            del self.oracle.leases[lease.lease_id]
        self.oracle.apply(self.cache.drop_instance(instance, self.now_s))
        self.instances[place] = InstanceKey(f"engine-{self.births}")
        self.births += 1

    @rule(which=PICK)
    def refuse_the_illegal(self, which):
        """An illegal call raises, and changes nothing."""
        before = self.cache.statistics()
        with pytest.raises(errors.StoreNotFound):
            self.cache.commit_store(StoreId(10**6), self.now_s)
        with pytest.raises(errors.StoreNotFound):
            self.cache.abort_store(StoreId(10**6), UnstoredReason.COPIER, self.now_s)
        with pytest.raises(errors.LoadNotFound):
            self.cache.end_load(LoadId(10**6), loaded=True, now_s=self.now_s)
        if self.open_jobs():
            job = pick(self.open_jobs(), which)
            head = (job.namespace, job.generation, job.group, job.parent)
            with pytest.raises(errors.JobConflict):
                self.cache.begin_store(job.ref, min(job.begun), *head, job.hashes, self.now_s)
            missing = min(r for r in range(job.ranks_total) if r not in job.begun)
            with pytest.raises(errors.JobConflict):
                self.cache.begin_store(job.ref, missing, *head, (*job.hashes, b"other"), self.now_s)
        assert self.cache.statistics() == before

    # Always

    @invariant()
    def counts_hold(self):
        if self.checks_invariants:
            self.cache.check_invariants()
        statistics = self.cache.statistics()
        assert statistics.blocks_ready == len(self.oracle.ready)
        assert statistics.loads_in_flight == len(self.oracle.loads)
        assert statistics.leases == len(self.oracle.leases)
        total = self.cache.ledger_total()
        assert total.is_conserved
        assert total.submitted == self.oracle.submitted

    def teardown(self):
        """When all that runs has ended, nothing is left but ready blocks."""
        if sys.exc_info()[0] is not None:
            return  # A step has failed: that is what is to be reported.
        for load_id in list(self.oracle.loads):
            self.finish_load(load_id, loaded=True)
        if self.job_ids % 2:
            # Where all ranks come and all copies end, no deadline is needed.
            for job in self.open_jobs():
                while len(job.begun) < job.ranks_total:
                    self.join_first(job)
            self.end_all()
            for job in self.oracle.jobs.values():
                assert job.settled.keys() == job.begun, f"never settled: {job}"
        self.expire(1000.0)
        self.end_all()
        for job in self.oracle.jobs.values():
            assert job.settled.keys() == job.begun, f"never settled: {job}"
        self.counts_hold()
        total = self.cache.ledger_total()
        assert total.in_flight == 0
        assert total.stored == self.oracle.stored
        statistics = self.cache.statistics()
        assert (statistics.holds, statistics.leases, statistics.jobs_open) == (0, 0, 0)
        assert (statistics.blocks_pending, statistics.slots_quarantined) == (0, 0)
        ranks = {view.namespace: view.ranks_total for view in self.namespaces}
        slots = sum(ranks[key.namespace] for key in self.oracle.ready)
        assert statistics.slots_used == slots, f"{statistics.slots_used} slots used for {slots}"


def pick(candidates: Sequence, which: int):
    """One of them; the same for the same number."""
    return candidates[which % len(candidates)]

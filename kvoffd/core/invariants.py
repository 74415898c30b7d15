"""Invariants: what must be true of the core between two calls.

Owns nothing and changes nothing. Everything is counted anew from the records of one
part and compared with what another part says; a failure names both.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvoffd.core.entry import BlockEntry, BlockState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvoffd.core.allocator import Extent
    from kvoffd.core.blocks import Blocks
    from kvoffd.core.jobs import Job
    from kvoffd.core.leases import Leases
    from kvoffd.core.stores import Stores
    from kvoffd.core.types import BlockKey, InstanceKey, NamespaceId


def check(blocks: Blocks, stores: Stores, leases: Leases) -> None:
    """Raises AssertionError at the first untruth."""
    entries = _check_slots(blocks)
    _check_index(blocks)
    _check_lives(blocks, entries)
    _check_holds(blocks, stores, leases, entries)
    _check_policy(blocks)
    _check_open_stores(blocks, stores, entries)
    _check_jobs(stores)
    _check_ledgers(stores)
    _check_namespaces(blocks, entries)


def _check_slots(blocks: Blocks) -> set[BlockEntry]:
    """Every slot is free or belongs to exactly one shard. Answers all entries with slots."""
    entries: set[BlockEntry] = set()
    free: Counter[int] = Counter()
    used = bytes_used = extents_used = 0
    for extent in blocks.allocator.extents():
        _check_extent(extent)
        entries.update(extent.used.values())
        used += len(extent.used)
        bytes_used += len(extent.used) * extent.slot_bytes
        if extent.slot_bytes:
            extents_used += 1
            free[extent.slot_bytes] += extent.slots_free
        for slot, entry in extent.used.items():
            assert slot in entry.occupied_slots(), f"slot {slot} is not one of {entry}"
            assert entry.slot_bytes == extent.slot_bytes, f"{entry} in extent {extent.index}"
            assert extent.index in entry.extents, f"{entry} does not know extent {extent.index}"
    owned = sum(len(set(entry.occupied_slots())) for entry in entries)
    assert owned == used, f"{used} slots in use, but {owned} belong to shards"
    allocator = blocks.allocator
    assert allocator.slots_used == used, f"{allocator.slots_used} slots counted, {used} used"
    assert allocator.bytes_used == bytes_used, f"{allocator.bytes_used} bytes, {bytes_used} used"
    assert allocator.extents_used == extents_used, f"{extents_used} extents have a class"
    assert dict(allocator.free_by_class()) == dict(free), (
        f"free by class: counted {allocator.free_by_class()}, there are {dict(free)}"
    )
    return entries


def _check_extent(extent: Extent) -> None:
    where = f"extent {extent.index} of slots of {extent.slot_bytes} bytes"
    assert bool(extent.slot_bytes) == bool(extent.used), f"{where} has {len(extent.used)} used"
    assert len(set(extent.free)) == len(extent.free), f"{where} has a slot free twice"
    assert len(extent.free) + len(extent.used) == extent.fresh, f"{where} has lost a slot"
    assert extent.fresh <= extent.slots_total, f"{where} has given out {extent.fresh} slots"


def _check_index(blocks: Blocks) -> None:
    """Only whole blocks of the present generation are found; children are what they say."""
    children: dict[BlockKey, set[BlockEntry]] = {}
    for entry in blocks.index.entries():
        assert entry.linked, f"found but not linked: {entry}"
        assert blocks.index.get(entry.key) is entry, f"found under another key: {entry}"
        assert entry.state is not BlockState.ABORTED, f"found although aborted: {entry}"
        generation = blocks.namespaces.get(entry.key.namespace).generation
        assert entry.generation == generation, f"found in generation {generation}: {entry}"
        if entry.parent is not None:
            children.setdefault(entry.parent, set()).add(entry)
    assert set(blocks.index.parents()) == set(children), "keys with children are not the parents"
    for key, expected in children.items():
        found = blocks.index.children(key)
        assert found == expected, f"children of {key}: {found}, not {expected}"


def _check_lives(blocks: Blocks, entries: set[BlockEntry]) -> None:
    """Ready exactly when all ranks have committed; unfindable only while something needs it."""
    pending = quarantined = 0
    for entry in entries.union(blocks.index.entries()):
        whole = entry.occupied == entry.ranks_all
        assert not entry.open & entry.committed, f"committed under an open copy: {entry}"
        assert not entry.open & ~entry.occupied, f"a copy into a slot that is not ours: {entry}"
        committed = entry.committed == entry.ranks_all
        if entry.state is BlockState.ABORTED:
            assert entry.occupied == entry.open, f"aborted, with a slot that nobody needs: {entry}"
            assert not entry.linked, f"aborted but findable: {entry}"
            assert not entry.holds, f"aborted but held: {entry}"
            quarantined += entry.occupied.bit_count()
            continue
        assert whole, f"without the slots of all ranks: {entry}"
        assert (entry.state is BlockState.READY) == committed, (
            f"ready and committed differ: {entry}"
        )
        if entry.state is BlockState.PENDING:
            pending += 1
            assert entry.linked, f"pending but not findable: {entry}"
            assert not entry.holds, f"pending but held: {entry}"
        else:
            assert entry.linked or entry.holds, f"neither findable nor held: {entry}"
    assert blocks.pending == pending, f"{blocks.pending} pending counted, there are {pending}"
    assert blocks.slots_quarantined == quarantined, (
        f"{blocks.slots_quarantined} quarantined counted, there are {quarantined}"
    )


def _check_holds(blocks: Blocks, stores: Stores, leases: Leases, entries: set[BlockEntry]) -> None:
    """Holds are those of leases, loads and verdicts, and nothing held is gone."""
    holds: Counter[BlockEntry] = Counter()
    for lease in leases.leases():
        holds.update(lease.entries)
        assert lease.ended <= lease.begun, f"lease {lease.lease_id}: ended before begun"
        if lease.generation == lease.namespace.generation:
            lost = [entry for entry in lease.entries if not entry.linked]
            assert not lost, f"leased and not in the index: {lost}"
    for load in leases.loads():
        holds.update(load.entries)
    for job in stores.jobs():
        holds.update(job.held)
    for entry in entries.union(holds):
        assert entry.holds == holds[entry], f"{holds[entry]} holds are known of {entry}"
        assert not entry.holds or entry in entries, f"held, but its slots are gone: {entry}"
        assert not entry.holds or entry.state is BlockState.READY, f"held, not ready: {entry}"
    assert blocks.holds == holds.total(), f"{blocks.holds} holds counted, {holds.total()} known"


def _check_policy(blocks: Blocks) -> None:
    """The policy knows exactly the ready blocks, and may take exactly the free leaves."""
    ready = {entry for entry in blocks.index.entries() if entry.state is BlockState.READY}
    assert set(blocks.policy.known()) == ready, "the policy does not know just the ready blocks"
    leaves = {entry for entry in ready if not entry.holds and not blocks.index.children(entry.key)}
    offered = blocks.policy.evictable()
    assert len(offered) == len(set(offered)), "the policy has a block twice"
    assert set(offered) == leaves, f"evictable: {_names(offered)}; free leaves: {_names(leaves)}"
    for entry in ready:
        assert entry.evictable == (entry in leaves), f"evictable is wrong: {entry}"
    for slot_bytes in {entry.slot_bytes for entry in ready}:
        rest = [entry for entry in leaves if entry.slot_bytes == slot_bytes]
        coldest = blocks.policy.coldest(slot_bytes)
        assert (coldest is None) == (not rest), f"coldest of {slot_bytes} bytes is {coldest}"
        assert coldest is None or coldest in rest, f"the policy would evict {coldest}"


def _check_open_stores(blocks: Blocks, stores: Stores, entries: set[BlockEntry]) -> None:
    """Open copies are exactly those of the open stores."""
    open_ranks: dict[BlockEntry, int] = {}
    for store in stores.open_stores():
        assert store.entries, f"store {store.store_id} has no copies"
        for entry in store.entries:
            assert entry.writer == store.job, f"store of {store.job} writes {entry}"
            mask = open_ranks.get(entry, 0)
            assert not mask >> store.rank & 1, f"two stores of rank {store.rank} write {entry}"
            open_ranks[entry] = mask | 1 << store.rank
        over = all(entry.state is BlockState.ABORTED for entry in store.entries)
        assert store.cancelled == over, f"store {store.store_id}: cancelled {store.cancelled}"
    for entry in entries.union(open_ranks):
        mask = open_ranks.get(entry, 0)
        assert entry.open == mask, f"open stores cover ranks {mask:b} of {entry}"
    jobs = {job.ref: job for job in stores.jobs()}
    for entry in blocks.index.entries():
        if entry.state is BlockState.PENDING:
            job = jobs.get(entry.writer)
            assert job is not None, f"pending without a job: {entry}"
            assert job.blocks[entry.position] is entry, f"its job does not write it: {entry}"
            begun = sum(1 << rank for rank in job.begun)
            assert entry.open | entry.committed == begun, f"ranks {begun:b} have begun: {entry}"


def _check_jobs(stores: Stores) -> None:
    """Every open job is needed, its counts are those of its blocks, and no waiter is lost."""
    for job in stores.jobs():
        _check_job(stores, job)
        assert job.undecided or (job.held and job.ranks_missing), f"{job.ref} is over"
    for job in stores.remembered():
        _check_job(stores, job)
        assert not job.undecided, f"{job.ref} is remembered, but undecided"
        assert not job.held, f"{job.ref} is remembered, but holds blocks"
        assert job.ranks_missing, f"{job.ref} is remembered for nobody"
    for entry in stores.awaited():
        assert entry.state is BlockState.PENDING, f"awaited, but not pending: {entry}"


def _check_job(stores: Stores, job: Job) -> None:
    undecided = [b for b in job.blocks if isinstance(b, BlockEntry)]
    assert job.undecided == len(undecided), f"{job.ref}: {len(undecided)} blocks are undecided"
    tally = Counter(b for b in job.blocks if not isinstance(b, BlockEntry))
    assert dict(tally) == job.tally, f"{job.ref}: tally {job.tally}, blocks say {dict(tally)}"
    assert job.begun, f"no rank has begun {job.ref}"
    assert job.told == (set() if job.undecided else job.begun), f"{job.ref} told {job.told}"
    assert not job.dropped, f"{job.ref} is dropped and still here"
    for position, entry in enumerate(job.blocks):
        if isinstance(entry, BlockEntry):
            assert entry.state is BlockState.PENDING, f"{job.ref} waits in vain for {entry}"
            assert entry.key == job.key(position), f"{job.ref} waits at {position} for {entry}"
            if entry.writer != job.ref:
                waiting = stores.waiting(entry).count((job, position))
                assert waiting == 1, f"{job.ref} is {waiting} times in line for {entry}"


def _check_ledgers(stores: Stores) -> None:
    """Nothing submitted is lost, and in flight is what the jobs say."""
    in_flight: Counter[InstanceKey] = Counter()
    for job in stores.jobs():
        in_flight[job.ref.instance] += job.undecided * len(job.begun)
    for instance in in_flight.keys() | set(stores.ledgers.instances()):
        ledger = stores.ledgers.ledger(instance)
        assert ledger.is_conserved, f"{instance}: {ledger}"
        assert ledger.in_flight == in_flight[instance], (
            f"{instance}: {ledger.in_flight} in flight, the jobs say {in_flight[instance]}"
        )
    total = stores.ledgers.total()
    assert total.is_conserved, f"all instances: {total}"
    assert total.in_flight == in_flight.total(), f"in flight: {total}, {in_flight.total()}"


def _check_namespaces(blocks: Blocks, entries: set[BlockEntry]) -> None:
    """The gauges of each namespace are those of its blocks."""
    ready: Counter[NamespaceId] = Counter()
    bytes_used: Counter[NamespaceId] = Counter()
    for entry in entries:
        bytes_used[entry.key.namespace] += entry.occupied.bit_count() * entry.slot_bytes
        if entry.linked and entry.state is BlockState.READY:
            ready[entry.key.namespace] += 1
    for namespace in blocks.namespaces:
        name = namespace.namespace
        assert namespace.blocks_ready == ready[name], f"{name}: {ready[name]} blocks are ready"
        assert namespace.bytes_used == bytes_used[name], f"{name}: {bytes_used[name]} bytes used"


def _names(entries: Iterable[BlockEntry]) -> list[str]:
    return sorted(repr(entry) for entry in entries)

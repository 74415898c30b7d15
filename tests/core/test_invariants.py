"""check_invariants: each untruth that is planted into a sound cache is seen, and named."""

import pytest
from core.core_driver import ENGINE, RIVAL, Driver

from kvoffd.core.entry import BlockState
from kvoffd.core.ledger import Kept
from kvoffd.core.types import BlockKey, JobRef, SlotId, UnstoredReason


@pytest.fixture
def busy():
    """A cache with one block of each kind, all of them in order."""
    driver = Driver(extents_total=6)
    driver.store("ab")
    driver.store("z")
    lease = driver.lookup("z")
    driver.load(lease.lease_id)
    driver.begin("p", job=JobRef(RIVAL, 1))
    driver.begin("p", job=JobRef(ENGINE, 90))
    driver.begin("ab", job=JobRef(ENGINE, 91))
    driver.begin("s", generation=0, job=JobRef(ENGINE, 92))
    torn = JobRef(ENGINE, 93)
    plans = [driver.begin("t", rank=rank, job=torn).stores[0] for rank in (0, 1)]
    driver.cache.abort_store(plans[0].store_id, UnstoredReason.COPIER, driver.now_s)
    driver.store("l", group=1)
    driver.cache.check_invariants()
    return driver


def entry(driver, path, group=0):
    """The attempt that the index has."""
    found = driver.cache._blocks.index.get(BlockKey(driver.namespace, group, path.encode()))
    assert found is not None
    return found


def job(driver, number, instance=ENGINE):
    """An open job's record."""
    return driver.cache._stores._jobs[JobRef(instance, number)]


def remembered(driver):
    """The record of the job that only waits for its late rank."""
    return driver.cache._stores._remembered[JobRef(ENGINE, 92)]


def set_on(find, name, value):
    """Plants one attribute."""

    def plant(driver):
        found = find(driver)
        setattr(found, name, value(getattr(found, name)))

    return plant


def unlink_leased(driver):
    """The index loses a block that a lease names."""
    found = entry(driver, "z")
    driver.cache._blocks._forget(found)


def lose_waiter(driver):
    """The line for a pending block is emptied."""
    driver.cache._stores._waiters.clear()


def steal_slot(driver):
    """A slot is noted for another block than its owner."""
    extent = next(e for e in driver.cache._blocks.allocator.extents() if e.used)
    extent.used[next(iter(extent.used))] = entry(driver, "l", group=1)


def lose_slot(driver):
    """A slot is neither free nor used."""
    extent = next(e for e in driver.cache._blocks.allocator.extents() if e.used)
    del extent.used[SlotId(next(iter(extent.used)))]


def free_twice(driver):
    """A slot is free twice."""
    extent = next(e for e in driver.cache._blocks.allocator.extents() if e.used)
    extent.free.extend([7, 7])


def offer_held(driver):
    """The policy may evict a held block."""
    driver.cache._blocks.policy.add(entry(driver, "z"))


def forget_ready(driver):
    """The policy does not know a ready block."""
    driver.cache._blocks.policy.forget(entry(driver, "z"))


def lose_job(driver):
    """A pending block's job is gone."""
    driver.cache._stores._jobs.pop(JobRef(RIVAL, 1))


def lose_store(driver):
    """A copy that may run belongs to no store."""
    driver.cache._stores._open.popitem()


def lose_child(driver):
    """A head does not know its tail."""
    driver.cache._blocks.index._children.clear()


def spend(driver):
    """A verdict is counted twice."""
    driver.cache._stores.ledgers.decide(RIVAL, Kept.STORED, 1)


def submit_more(driver):
    """More is in flight than the jobs have."""
    driver.cache._stores.ledgers.submit(ENGINE, 1)


def seal(driver):
    """Ready before its ranks have committed."""
    entry(driver, "p").state = BlockState.READY


UNTRUTHS = {
    "leased block is not found": unlink_leased,
    "waiter is lost": lose_waiter,
    "slot of another": steal_slot,
    "slot is lost": lose_slot,
    "slot is free twice": free_twice,
    "held block is offered": offer_held,
    "ready block is forgotten": forget_ready,
    "job is lost": lose_job,
    "store is lost": lose_store,
    "child is lost": lose_child,
    "ledger does not add up": spend,
    "ledger and jobs differ": submit_more,
    "ready too early": seal,
    "hold too many": set_on(lambda d: entry(d, "z"), "holds", lambda n: n + 1),
    "hold too few": set_on(lambda d: entry(d, "z"), "holds", lambda n: n - 1),
    "holds are miscounted": set_on(lambda d: d.cache._blocks, "holds", lambda n: n + 1),
    "pending are miscounted": set_on(lambda d: d.cache._blocks, "pending", lambda n: n + 1),
    "quarantine is miscounted": set_on(
        lambda d: d.cache._blocks, "slots_quarantined", lambda n: n - 1
    ),
    "old generation is found": set_on(lambda d: entry(d, "z"), "generation", lambda n: n - 1),
    "committed rank is lost": set_on(lambda d: entry(d, "z"), "committed", lambda _: 1),
    "copy is not known": set_on(lambda d: entry(d, "p"), "open", lambda _: 3),
    "evictable although held": set_on(lambda d: entry(d, "z"), "evictable", lambda _: True),
    "slots counted": set_on(lambda d: d.cache._blocks.allocator, "_slots_used", lambda n: n + 1),
    "bytes counted": set_on(lambda d: d.cache._blocks.allocator, "_bytes_used", lambda n: n + 1),
    "free counted": set_on(lambda d: d.cache._blocks.allocator, "_free", lambda _: {128: 1}),
    "undecided counted": set_on(lambda d: job(d, 90), "undecided", lambda n: n + 1),
    "tally counted": set_on(lambda d: job(d, 91), "tally", lambda _: {}),
    "told too early": set_on(lambda d: job(d, 90), "told", lambda _: {0}),
    "decided job holds nothing": set_on(lambda d: job(d, 91), "held", lambda _: []),
    "remembered for nobody": set_on(remembered, "begun", lambda _: {0, 1}),
    "remembered and undecided": set_on(remembered, "undecided", lambda _: 1),
    "dropped and still here": set_on(remembered, "dropped", lambda _: True),
    "ready blocks of a namespace": set_on(
        lambda d: d.cache._blocks.namespaces.get(d.namespace), "blocks_ready", lambda n: n + 1
    ),
    "bytes of a namespace": set_on(
        lambda d: d.cache._blocks.namespaces.get(d.namespace), "bytes_used", lambda n: n + 1
    ),
}


@pytest.mark.parametrize("untruth", UNTRUTHS)
def test_an_untruth_is_seen(busy, untruth):
    """One at a time, with the facts in the message."""
    UNTRUTHS[untruth](busy)
    with pytest.raises(AssertionError, match=r"\w"):
        busy.cache.check_invariants()


def test_a_block_says_what_it_is(busy):
    """The facts of a failure are readable."""
    assert repr(entry(busy, "z")).startswith("<block 1/0/7a sequence 3 ready linked=True holds=2")

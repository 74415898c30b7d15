"""Leases and loads: what was found stays loadable, and a load holds for itself."""

import pytest
from core.core_driver import ENGINE, RIVAL, Driver

from kvoffd.core.types import LeaseId, LoadId, NamespaceId
from kvoffd.errors import (
    BadRequest,
    JobConflict,
    LeaseNotFound,
    LoadNotFound,
    NamespaceNotFound,
    Overloaded,
    StaleGeneration,
)


def test_a_lookup_stops_at_the_first_miss(driver):
    """No hash behind it is even asked for."""
    driver.store("ab")
    hashes = iter([b"a", b"ab", b"abc", b"abcd"])
    result = driver.cache.lookup(ENGINE, driver.namespace, 1, 0, hashes, driver.now_s)
    assert (result.hit_blocks, result.lease_ttl_s) == (2, 10.0)
    assert list(hashes) == [b"abcd"]
    statistics = driver.cache.statistics()
    assert (statistics.lookups, statistics.lookup_blocks) == (1, 3)
    assert statistics.lookup_hit_blocks == 2


def test_a_miss_has_no_lease(driver):
    """Nothing is promised, so there is nothing to give back."""
    driver.begin("a")
    assert driver.lookup("a").lease_id is None
    assert driver.cache.statistics().leases == 0


def test_each_rank_loads_its_own_shards_once(driver):
    """Slots come in the order of the lease's blocks; the last end releases the lease."""
    job = driver.job()
    begun = [driver.begin("abc", rank=rank, job=job) for rank in (0, 1)]
    driver.commit(*begun)
    lease = driver.lookup("abc")
    for rank in (0, 1):
        plan = driver.load(lease.lease_id, rank, skip_blocks=1, blocks=2)
        slots = tuple(write.record.slot for write in begun[rank].stores[0].writes)
        assert plan.slots == slots[1:]
        assert plan.length_bytes == 128
        with pytest.raises(JobConflict):
            driver.load(lease.lease_id, rank)
        assert driver.cache.statistics().leases == 1
        good, _ = driver.cache.end_load(plan.load_id, loaded=rank == 0, now_s=driver.now_s)
        assert good == (rank == 0)
    statistics = driver.cache.statistics()
    assert (statistics.leases, statistics.holds) == (0, 0)
    assert (statistics.loaded_blocks, statistics.failed_load_blocks) == (2, 2)


def test_a_load_outlives_its_lease(driver):
    """The copy's own hold is why the slots are not reused under it."""
    driver.store("abcd")
    lease = driver.lookup("abcd")
    plan = driver.load(lease.lease_id, blocks=4)
    driver.now_s = 10.1
    assert driver.cache.expire(driver.now_s).expired_leases == (lease.lease_id,)
    assert driver.begin("z").stores == ()
    with pytest.raises(LeaseNotFound):
        driver.load(lease.lease_id, rank=1)
    good, _ = driver.cache.end_load(plan.load_id, loaded=True, now_s=driver.now_s)
    assert good
    assert len(driver.begin("z").stores) == 1
    with pytest.raises(LoadNotFound):
        driver.cache.end_load(plan.load_id, loaded=True, now_s=driver.now_s)


def test_a_load_over_a_reset_is_not_good(driver):
    """Its slots stay until it ends; new loads and lookups of the old generation are refused."""
    driver.store("a")
    lease = driver.lookup("a")
    plan = driver.load(lease.lease_id)
    assert driver.cache.reset_namespace(driver.namespace, driver.now_s).effects.freed == ()
    with pytest.raises(StaleGeneration):
        driver.load(lease.lease_id, rank=1)
    with pytest.raises(StaleGeneration):
        driver.load(lease.lease_id, rank=1, generation=2)
    with pytest.raises(StaleGeneration):
        driver.lookup("a")
    good, effects = driver.cache.end_load(plan.load_id, loaded=True, now_s=driver.now_s)
    assert not good
    assert effects.freed == ()
    driver.cache.check_invariants()
    _, effects = driver.cache.release(ENGINE, [lease.lease_id], driver.now_s)
    assert len(effects.freed) == 2


def test_a_lease_is_renewed_from_now(driver):
    """All bounds are inclusive: at its deadline a lease still lives."""
    driver.store("a")
    lease = driver.lookup("a")
    younger = driver.lookup("a")
    driver.now_s = 10.0
    assert driver.cache.expire(driver.now_s).expired_leases == ()
    assert driver.cache.renew(ENGINE, lease.lease_id, driver.now_s) == 10.0
    driver.now_s = 20.0
    assert driver.cache.expire(driver.now_s).expired_leases == (younger.lease_id,)
    driver.now_s = 20.1
    assert driver.cache.expire(driver.now_s).expired_leases == (lease.lease_id,)


def test_a_lease_belongs_to_its_instance(driver):
    """Another instance's lease is not found."""
    driver.store("a")
    lease = driver.lookup("a")
    assert driver.cache.release(RIVAL, [lease.lease_id], driver.now_s)[0] == 0
    assert driver.cache.leases_of(ENGINE) == 1
    assert driver.cache.leases_of(RIVAL) == 0
    with pytest.raises(LeaseNotFound):
        driver.cache.renew(RIVAL, lease.lease_id, driver.now_s)
    with pytest.raises(LeaseNotFound):
        driver.load(lease.lease_id, instance=RIVAL)
    ids = [lease.lease_id, LeaseId(99)]
    assert driver.cache.release(ENGINE, ids, driver.now_s)[0] == 1


def test_illegal_loads_raise_and_change_nothing(driver):
    """Blocks and ranks are those of the lease."""
    driver.store("ab")
    lease = driver.lookup("ab")
    before = driver.cache.statistics()
    for skip_blocks, blocks in ((0, 3), (2, 1), (-1, 1), (0, 0)):
        with pytest.raises(BadRequest):
            driver.load(lease.lease_id, skip_blocks=skip_blocks, blocks=blocks)
    with pytest.raises(BadRequest):
        driver.load(lease.lease_id, rank=2)
    with pytest.raises(LoadNotFound):
        driver.cache.end_load(LoadId(99), loaded=True, now_s=driver.now_s)
    with pytest.raises(BadRequest):
        driver.lookup("ab", group=7)
    with pytest.raises(NamespaceNotFound):
        driver.cache.lookup(ENGINE, NamespaceId(9), 1, 0, [b"a"], driver.now_s)
    assert driver.cache.statistics() == before


def test_leases_beyond_the_limit_are_refused():
    """The lookup says so, touches nothing and counts nothing; a miss needs no lease."""
    driver = Driver(leases_max=1)
    driver.store("a")
    driver.lookup("a")
    before = driver.cache.statistics()
    with pytest.raises(Overloaded):
        driver.lookup("a")
    assert driver.cache.statistics() == before
    assert driver.lookup("b").hit_blocks == 0
    driver.cache.check_invariants()

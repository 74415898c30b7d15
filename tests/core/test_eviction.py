"""Eviction: the tail of what was used least, all or nothing, and never what is in use."""

from core.core_driver import ENGINE, Driver, reasons

from kvoffd.core.types import UnstoredReason


def test_the_least_recently_used_leaf_goes_first(driver):
    """A lookup is a use, and so is a store of what is present."""
    for path in "abcd":
        driver.store(path)
    driver.hits("a")
    driver.store("b")
    driver.store("e")
    assert [driver.hits(path) for path in "abcde"] == [1, 1, 0, 1, 1]
    assert driver.cache.statistics().evicted_blocks == 1


def test_the_tail_of_a_prefix_goes_before_its_head(driver):
    """Although the whole prefix is older than everything else."""
    driver.store("abc")
    driver.store("z")
    driver.store("yy")
    assert driver.hits("abc") == 1
    assert driver.hits("z") == 1
    assert driver.hits("yy") == 2


def test_a_leased_prefix_is_spared(driver):
    """Its leaf is; and so is every head, for having a child."""
    driver.store("abc")
    lease = driver.lookup("abc")
    driver.store("z")
    assert reasons(driver.begin("yy")) == []
    assert driver.hits("z") == 0
    effects = driver.begin("x")
    assert reasons(effects) == [{UnstoredReason.NO_SLOT: 1}]
    driver.cache.release(ENGINE, [lease.lease_id], driver.now_s)
    assert driver.hits("abc") == 3
    assert len(driver.begin("x").stores) == 1


def test_a_job_does_not_evict_its_own_blocks(driver):
    """Neither those that are present nor the one before its first."""
    driver.store("ab")
    driver.store("z")
    driver.store("y")
    job = driver.job()
    begun = [driver.begin("abcd", start=1, rank=rank, job=job) for rank in (0, 1)]
    driver.commit(*begun)
    assert driver.hits("abcd") == 4
    job = driver.job()
    begun = [driver.begin("abcde", start=4, rank=rank, job=job) for rank in (0, 1)]
    assert reasons(begun[0]) == [{UnstoredReason.NO_SLOT: 1}]
    assert driver.hits("abcd") == 4


def test_after_the_first_block_without_a_slot_the_rest_has_none(driver):
    """A tail without its head is useless, so nothing is evicted for it."""
    effects = driver.begin("abcdef")
    assert [write.block for write in effects.stores[0].writes] == [0, 1, 2, 3]
    done = driver.commit(effects, driver.begin("abcdef", rank=1, job=effects.stores[0].job))
    assert reasons(done) == [{UnstoredReason.NO_SLOT: 2}] * 2
    assert driver.hits("abcdef") == 4


def test_a_block_that_finds_no_room_evicts_nothing():
    """One victim of one rank is not enough for two ranks, so it is put back."""
    driver = Driver(extents_total=1)
    single = driver.cache.register_namespace(b"single", 1, {0: 128}).namespace
    job = driver.job()
    begun = driver.cache.begin_store(job, 0, single, 1, 0, None, [b"a", b"ab"], 0.0)
    driver.commit(begun)
    held = driver.cache.lookup(ENGINE, single, 1, 0, [b"a"], 0.0)
    driver.begin("z")
    before = driver.cache.statistics()
    assert reasons(driver.begin("y")) == [{UnstoredReason.NO_SLOT: 1}]
    after = driver.cache.statistics()
    assert (after.evicted_blocks, after.slots_used) == (0, before.slots_used)
    found = driver.cache.lookup(ENGINE, single, 1, 0, [b"a", b"ab"], 0.0)
    assert found.hit_blocks == 2
    driver.cache.release(ENGINE, [held.lease_id, found.lease_id], 0.0)
    assert len(driver.begin("x").stores) == 1
    assert driver.cache.statistics().evicted_blocks == 2
    driver.cache.check_invariants()


def test_an_extent_takes_a_class_and_gives_it_back(driver):
    """The service hears of each change: the header is written while no slot is in use."""
    job = driver.job()
    begun = driver.begin("a", job=job, group=1)
    assert begun.extents == ((0, 256),)
    assert [driver.cache.slot_offset_bytes(w.record.slot) for w in begun.stores[0].writes] == [0]
    later = driver.begin("a", rank=1, job=job, group=1)
    assert driver.cache.slot_offset_bytes(later.stores[0].writes[0].record.slot) == 256
    driver.commit(begun, later)
    result = driver.cache.reset_namespace(driver.namespace, 0.0)
    assert result.effects.extents == ((0, 0),)
    assert driver.cache.statistics().extents_used == 0


def test_the_coldest_extent_of_another_class_is_reclaimed(driver):
    """All blocks in it go, and their descendants; the hotter extent stays."""
    driver.store("ab")
    driver.store("cd")
    driver.hits("ab")
    begun = driver.begin("z", group=1)
    assert sorted(begun.extents) == [(1, 256)]
    assert [driver.hits(path) for path in ("ab", "cd")] == [2, 0]


def test_own_victims_go_before_a_hotter_extent(driver):
    """An extent is reclaimed only if all in it is colder than the own victim."""
    driver.store("a", group=1)
    driver.store("bc")
    driver.store("z", group=1)
    assert driver.hits("bc") == 2
    assert driver.hits("a", group=1) == 0


def test_a_colder_extent_goes_before_own_victims(driver):
    """Though the class has victims of its own."""
    driver.store("bc")
    driver.store("a", group=1)
    driver.store("z", group=1)
    assert driver.hits("bc") == 0
    assert driver.hits("a", group=1) == 1


def test_an_extent_with_a_held_block_is_not_reclaimed(driver):
    """Nor one that a job is writing to."""
    driver.store("ab")
    driver.begin("x")
    driver.lookup("a")
    effects = driver.begin("z", group=1)
    assert reasons(effects) == [{UnstoredReason.NO_SLOT: 1}]
    assert driver.hits("ab") == 2


def test_descendants_outside_the_extent_must_be_free_too():
    """A head in a cold extent is spared while its tail is held, or hotter than our victim."""
    driver = Driver(extents_total=3)
    driver.store("a", group=1)
    driver.store("bc")
    driver.store("bcd", start=2)
    driver.hits("a", group=1)
    job = driver.job()
    # The tail alone is touched, as a store that begins in mid-prefix does.
    driver.begin("bcd", start=2, job=job)
    driver.begin("bcd", start=2, rank=1, job=job)
    driver.store("y", group=1)
    assert driver.hits("bcd") == 3
    assert driver.hits("a", group=1) == 0
    driver.cache.check_invariants()


def test_a_reclaimed_extent_takes_only_the_blocks_in_it():
    """Blocks of three ranks span extents: the head that lies in another extent stays."""
    driver = Driver(extents_total=3, ranks_total=3)
    driver.store("ab")
    driver.store("z", group=1)
    assert driver.cache.statistics().slots_used == 6
    assert driver.hits("ab") == 1
    assert driver.hits("z", group=1) == 1
    driver.cache.check_invariants()


def test_the_search_goes_on_where_the_block_before_ended():
    """A head's extent goes with its tail's, and then the next one, in one call."""
    driver = Driver(extents_total=3)
    driver.store("abcd")
    driver.store("kl")
    job = driver.job()
    for rank in (0, 1):
        driver.begin("abcd", start=2, rank=rank, job=job)
    driver.hits("kl")
    effects = driver.begin("xyz", group=1)
    assert len(effects.stores[0].writes) == 3
    assert [driver.hits(path) for path in ("abcd", "kl")] == [0, 0]
    assert len(effects.freed) == 12
    driver.cache.check_invariants()


def test_a_chain_that_is_put_back_is_as_it_was():
    """Tail and head were both chosen, and were not enough."""
    driver = Driver(extents_total=1, ranks_total=3)
    single = driver.cache.register_namespace(b"single", 1, {0: 128}).namespace
    chain = [b"a", b"ab"]
    driver.commit(driver.cache.begin_store(driver.job(), 0, single, 1, 0, None, chain, 0.0))
    driver.cache.begin_store(driver.job(), 0, single, 1, 0, None, [b"k", b"kl"], 0.0)
    assert reasons(driver.begin("z")) == [{UnstoredReason.NO_SLOT: 1}]
    driver.cache.check_invariants()
    found = driver.cache.lookup(ENGINE, single, 1, 0, chain, 0.0)
    assert found.hit_blocks == 2

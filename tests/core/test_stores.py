"""Stores: verdicts fall once for all ranks, and nothing unsealed is ever found."""

import pytest
from core.core_driver import ENGINE, RIVAL, Driver, reasons

from kvoffd.core.ledger import Ledger
from kvoffd.core.types import InstanceKey, JobRef, NamespaceId, StoreId, UnstoredReason
from kvoffd.errors import BadRequest, JobConflict, NamespaceNotFound, StoreNotFound


def test_a_block_is_ready_when_the_last_rank_has_committed(driver):
    """One rank's shards are no block."""
    job = driver.job()
    first = driver.begin("ab", job=job)
    second = driver.begin("ab", rank=1, job=job)
    assert driver.commit(second).ready == ()
    assert driver.hits("ab") == 0

    sealed = driver.commit(first)

    assert len(sealed.ready) == 4
    assert [(s.rank, s.stored) for s in sealed.settled] == [(0, 2), (1, 2)]
    assert driver.hits("ab") == 2
    assert driver.cache.statistics().jobs_open == 0


def test_all_shards_of_a_block_have_one_sequence(driver):
    """Recovery tells by it which shards belong together."""
    job = driver.job()
    plans = [driver.begin("ab", rank=rank, job=job).stores[0] for rank in (0, 1)]
    sequences = [[write.record.sequence for write in plan.writes] for plan in plans]
    assert sequences[0] == sequences[1]
    assert len(set(sequences[0])) == 2


def test_a_ready_block_is_present_for_all_ranks_of_a_job(driver):
    """It is held until the last rank has begun, so that no rank hears otherwise."""
    driver.store("a")
    job = driver.job()
    first = driver.begin("a", job=job)
    assert first.stores == ()
    assert [(s.rank, s.present) for s in first.settled] == [(0, 1)]
    assert driver.cache.statistics().holds == 1
    second = driver.begin("a", rank=1, job=job)
    assert [(s.rank, s.present) for s in second.settled] == [(1, 1)]
    assert driver.cache.statistics().holds == 0


def test_a_present_block_is_kept_until_the_late_rank_or_the_deadline(driver):
    """A rank that never comes cannot hold blocks for ever, and one that is late hears the same."""
    driver.store("a")
    job = driver.job()
    driver.begin("a", job=job)
    driver.now_s = 30.0
    driver.cache.expire(driver.now_s)
    assert driver.cache.statistics().holds == 1
    driver.now_s = 30.1
    driver.cache.expire(driver.now_s)
    assert driver.cache.statistics().holds == 0
    assert driver.cache.statistics().jobs_open == 0
    assert driver.begin("a", rank=1, job=job).settled[0].present == 1


def test_a_pending_block_of_another_job_is_awaited_without_a_slot(driver):
    """The waiter is in flight until the writer has ended; then the block is present."""
    writers = [driver.begin("a", rank=rank, job=JobRef(RIVAL, 1)) for rank in (0, 1)]
    job = driver.job()
    waiting = [driver.begin("a", rank=rank, job=job) for rank in (0, 1)]
    assert all(not effects.stores and not effects.settled for effects in waiting)
    assert driver.cache.ledger(ENGINE).in_flight == 2
    done = driver.commit(*writers)
    assert {(s.job.instance, s.stored, s.present) for s in done.settled} == {
        (RIVAL, 1, 0),
        (ENGINE, 0, 1),
    }
    assert driver.cache.statistics().slots_used == 2


def test_the_first_waiter_that_was_not_revoked_becomes_the_writer(driver):
    """It gets new slots and a new sequence, for the ranks that have begun it, and later ones."""
    writer = driver.begin("a", job=JobRef(RIVAL, 1))
    revoked, heir, third = driver.job(), driver.job(), driver.job()
    for job in (revoked, heir, third):
        driver.begin("a", job=job)
    driver.cache.revoke_job(revoked, UnstoredReason.REVOKED, driver.now_s)
    plan = writer.stores[0]
    done = driver.cache.abort_store(plan.store_id, UnstoredReason.COPIER, driver.now_s)
    assert [(p.job, p.rank) for p in done.stores] == [(heir, 0)]
    assert done.stores[0].writes[0].record.sequence > plan.writes[0].record.sequence
    assert [(s.job, dict(s.unstored)) for s in done.settled] == [
        (JobRef(RIVAL, 1), {UnstoredReason.COPIER: 1})
    ]
    late = driver.begin("a", rank=1, job=heir)
    assert [(p.job, p.rank) for p in late.stores] == [(heir, 1)]
    sealed = driver.commit(done, late)
    assert {(s.job, s.rank, s.stored, s.present) for s in sealed.settled} == {
        (heir, 0, 1, 0),
        (heir, 1, 1, 0),
        (third, 0, 0, 1),
    }


def test_an_heir_without_room_is_rejected_and_the_next_one_is_asked():
    """No waiter is left behind, and a tail without its head gets no slot either."""
    driver = Driver(extents_total=1)
    writer = driver.begin("ab", job=JobRef(RIVAL, 1))
    heirs = [driver.job(), driver.job()]
    for job in heirs:
        driver.begin("ab", job=job)
    other = driver.begin("ab", rank=1, job=JobRef(RIVAL, 1))
    # Rank 1's copies still run: its two slots are quarantined, so one block has no room.
    done = driver.cache.abort_store(writer.stores[0].store_id, UnstoredReason.COPIER, driver.now_s)
    assert [plan.job for plan in done.stores] == [heirs[0]]
    assert [write.block for write in done.stores[0].writes] == [0]
    assert (heirs[1], 0) not in [(s.job, s.stored) for s in done.settled]
    assert driver.cache.statistics().slots_quarantined == 2
    driver.cache.check_invariants()
    freed = driver.commit(other)
    assert sorted(freed.freed) == sorted(w.record.slot for w in other.stores[0].writes)
    late = driver.begin("ab", rank=1, job=heirs[0])
    settled = driver.commit(done, late).settled
    assert {(s.job, s.rank, s.stored, s.present) for s in settled} == {
        (heirs[0], 0, 1, 0),
        (heirs[0], 1, 1, 0),
        (heirs[1], 0, 0, 1),
    }
    assert all(dict(s.unstored) == {UnstoredReason.NO_SLOT: 1} for s in settled)
    driver.cache.check_invariants()


def test_a_job_with_a_lost_block_goes_on_with_the_others(driver):
    """Only a store whose blocks are all aborted is cancelled."""
    writer = driver.begin("a", job=JobRef(RIVAL, 1))
    job = driver.job()
    own = driver.begin("ab", job=job)
    heir = driver.cache.abort_store(writer.stores[0].store_id, UnstoredReason.COPIER, 0.0)
    lost = driver.cache.abort_store(heir.stores[0].store_id, UnstoredReason.COPIER, 0.0)
    assert (lost.cancelled, lost.settled) == ((), ())
    late = driver.begin("ab", rank=1, job=job)
    settled = driver.commit(own, late).settled
    assert [(s.stored, dict(s.unstored)) for s in settled] == [(1, {UnstoredReason.COPIER: 1})] * 2


def test_a_waiter_without_a_head_gets_no_slot_for_its_tail():
    """Both blocks come free at once; the job lost its head to no_slot before."""
    driver = Driver(extents_total=1)
    tail = [driver.begin("xy", start=1, rank=rank, job=JobRef(RIVAL, 1)) for rank in (0, 1)]
    head = [driver.begin("k", rank=rank, job=JobRef(RIVAL, 2)) for rank in (0, 1)]
    job = driver.job()
    assert driver.begin("xy", job=job).settled == ()
    driver.cache.abort_store(head[0].stores[0].store_id, UnstoredReason.COPIER, driver.now_s)
    done = driver.cache.abort_store(tail[0].stores[0].store_id, UnstoredReason.COPIER, driver.now_s)
    assert done.stores == ()
    assert {UnstoredReason.NO_SLOT: 2} in reasons(done)
    driver.cache.check_invariants()


def test_an_abort_frees_what_no_copy_writes_and_keeps_the_rest(driver):
    """The slot of a copy that may still run is freed when that copy is closed, not before."""
    job = driver.job()
    plans = [driver.begin("a", rank=rank, job=job).stores[0] for rank in (0, 1)]
    done = driver.cache.abort_store(plans[0].store_id, UnstoredReason.COPIER, driver.now_s)
    assert done.freed == (plans[0].writes[0].record.slot,)
    assert done.cancelled == (plans[1].store_id,)
    assert reasons(done) == [{UnstoredReason.COPIER: 1}] * 2
    assert driver.cache.statistics().slots_quarantined == 1
    ended = driver.cache.commit_store(plans[1].store_id, driver.now_s)
    assert ended.freed == (plans[1].writes[0].record.slot,)
    assert ended.ready == ()
    assert driver.hits("a") == 0


def test_an_abort_before_other_ranks_begin_frees_their_slots_too(driver):
    """They hear the verdict when they come."""
    job = driver.job()
    plan = driver.begin("a", job=job).stores[0]
    done = driver.cache.abort_store(plan.store_id, UnstoredReason.COPIER, driver.now_s)
    assert len(done.freed) == 2
    assert reasons(driver.begin("a", rank=1, job=job)) == [{UnstoredReason.COPIER: 1}]


def test_a_commit_after_revoke_frees_and_never_seals(driver):
    """The source blocks were reused: what was copied belongs to somebody else."""
    job = driver.job()
    plans = [driver.begin("ab", rank=rank, job=job).stores[0] for rank in (0, 1)]
    driver.cache.commit_store(plans[0].store_id, driver.now_s)
    done = driver.cache.revoke_job(job, UnstoredReason.REVOKED, driver.now_s)
    assert len(done.freed) == 2
    assert done.cancelled == (plans[1].store_id,)
    assert reasons(done) == [{UnstoredReason.REVOKED: 2}] * 2
    again = driver.cache.revoke_job(job, UnstoredReason.REVOKED, driver.now_s)
    assert (again.settled, again.cancelled) == ((), ())
    driver.cache.commit_store(plans[1].store_id, driver.now_s)
    assert driver.cache.statistics().slots_used == 0


def test_sealed_blocks_of_a_job_survive_its_revoke(driver):
    """A fence comes too late for bytes that were copied before it."""
    job = JobRef(RIVAL, 1)
    ends = [driver.begin("b", rank=rank, job=JobRef(RIVAL, 2)) for rank in (0, 1)]
    begun = [driver.begin("ab", rank=rank, job=job) for rank in (0, 1)]
    driver.commit(*begun)
    driver.cache.revoke_job(job, UnstoredReason.REVOKED, driver.now_s)
    assert driver.hits("ab") == 2
    driver.commit(*ends)


def test_a_stale_job_is_rejected_and_every_rank_hears_it(driver):
    """An old generation is an outcome, not an exception."""
    driver.cache.reset_namespace(driver.namespace, driver.now_s)
    job = driver.job()
    for rank in (0, 1):
        effects = driver.begin("ab", rank=rank, job=job)
        assert reasons(effects) == [{UnstoredReason.STALE_GENERATION: 2}]
    assert driver.cache.ledger(ENGINE) == Ledger(
        submitted=4, unstored=((UnstoredReason.STALE_GENERATION, 4),)
    )
    assert driver.cache.ledger(ENGINE).rejected == 4
    assert driver.cache.ledger(ENGINE).failed == 0


def test_a_reset_between_begin_and_commit_fails_the_job(driver):
    """Its copies free their slots when they end, and seal nothing."""
    driver.store("z")
    job = driver.job()
    begun = [driver.begin("a", rank=rank, job=job) for rank in (0, 1)]
    result = driver.cache.reset_namespace(driver.namespace, driver.now_s)
    assert (result.generation, result.blocks_dropped) == (2, 1)
    assert reasons(result.effects) == [{UnstoredReason.GENERATION_MOVED: 1}] * 2
    assert len(result.effects.cancelled) == 2
    driver.commit(*begun)
    assert driver.hits("a", generation=2) == 0
    assert driver.cache.statistics().slots_used == 0
    assert driver.cache.namespace(driver.namespace).generation == 2


def test_an_overdue_block_is_given_up_for_all_ranks(driver):
    """A rank that does not come, or a copy that does not end, fails the block."""
    job = driver.job()
    begun = driver.begin("a", job=job)
    waiter = driver.job()
    driver.now_s = 10.0
    driver.begin("a", job=waiter)
    driver.now_s = 31.0
    done = driver.cache.expire(driver.now_s)
    assert reasons(done) == [{UnstoredReason.DEADLINE: 1}]
    assert done.cancelled == (begun.stores[0].store_id,)
    assert [plan.job for plan in done.stores] == [waiter]
    assert reasons(driver.begin("a", rank=1, job=job)) == [{UnstoredReason.DEADLINE: 1}]


def test_a_dead_instance_leaves_nothing_but_its_open_copies(driver):
    """Jobs are forgotten and counted as lost; slots under copies wait for their end."""
    driver.store("z")
    lease = driver.lookup("z")
    over = driver.job()
    driver.begin("zz", job=over, refusal=UnstoredReason.DRAINING)
    present = driver.job()
    driver.begin("z", job=present)
    begun = driver.begin("a")
    before = driver.cache.ledger_total()
    done = driver.cache.drop_instance(ENGINE, driver.now_s)
    assert {UnstoredReason.RANK_LOST: 1} in reasons(done)
    assert done.cancelled == (begun.stores[0].store_id,)
    statistics = driver.cache.statistics()
    assert (statistics.leases, statistics.holds, statistics.jobs_open) == (0, 0, 0)
    assert statistics.slots_quarantined == 1
    assert driver.cache.ledger(ENGINE) == Ledger()
    assert driver.cache.ledger_total().submitted == before.submitted
    assert driver.cache.ledger_total().in_flight == 0
    assert driver.cache.release(ENGINE, [lease.lease_id], driver.now_s)[0] == 0
    driver.commit(begun)
    assert driver.cache.statistics().slots_quarantined == 0
    assert driver.cache.drop_instance(InstanceKey("nobody"), driver.now_s).settled == ()


def test_a_refused_job_is_rejected_for_every_rank(driver):
    """Also for the rank that comes when nothing is refused any more; a begun job goes on."""
    job = driver.job()
    first = driver.begin("a", job=job, refusal=UnstoredReason.NOT_COMPLETE)
    second = driver.begin("a", rank=1, job=job)
    assert reasons(first) == reasons(second) == [{UnstoredReason.NOT_COMPLETE: 1}]
    begun = driver.job()
    driver.begin("a", job=begun)
    late = driver.begin("a", rank=1, job=begun, refusal=UnstoredReason.DRAINING)
    assert len(late.stores) == 1


def test_jobs_beyond_the_limit_are_rejected():
    """The table of open jobs is bounded, and so is the memory of what was said."""
    driver = Driver(open_jobs_max=2)
    driver.begin("a")
    driver.begin("b")
    refused = [driver.job() for _ in range(3)]
    for job in refused:
        assert reasons(driver.begin("c", job=job)) == [{UnstoredReason.OVERLOADED: 1}]
    assert driver.cache.statistics().jobs_open == 2
    driver.cache.expire(100.0)
    driver.now_s = 100.0
    # What was said to it is forgotten by now: its late rank begins anew, and finds room.
    assert reasons(driver.begin("c", rank=1, job=refused[2])) == []
    driver.cache.check_invariants()


def test_illegal_begins_raise_and_change_nothing(driver):
    """What contradicts the registration, the job itself or another rank is refused."""
    job = driver.job()
    driver.begin("ab", job=job)
    before = driver.cache.statistics(), driver.cache.ledger_total()
    with pytest.raises(JobConflict):
        driver.begin("ab", job=job)
    with pytest.raises(JobConflict):
        driver.begin("abc", rank=1, job=job)
    with pytest.raises(BadRequest):
        driver.begin("ab", rank=2, job=job)
    with pytest.raises(BadRequest):
        driver.begin("ab", group=2)
    with pytest.raises(BadRequest):
        driver.begin("")
    for hashes in ([b"x", b"x"], [b"parent"]):
        with pytest.raises(BadRequest):
            driver.cache.begin_store(
                driver.job(), 0, driver.namespace, 1, 0, b"parent", hashes, 0.0
            )
    with pytest.raises(NamespaceNotFound):
        driver.cache.begin_store(driver.job(), 0, NamespaceId(9), 1, 0, None, [b"x"], 0.0)
    with pytest.raises(StoreNotFound):
        driver.cache.commit_store(StoreId(99), 0.0)
    assert before == (driver.cache.statistics(), driver.cache.ledger_total())

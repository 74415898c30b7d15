"""A rank's session: each job that is handed over has one result, whatever the daemon does."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvoffd_client.lease_ids import lease_id_of
from kvoffd_client.ports import (
    NO_COMPLETIONS,
    Completions,
    Reason,
    ReasonCount,
    SessionState,
    Step,
    StoreResult,
)
from kvoffd_proto.v1 import handshake_pb2, offload_pb2
from tests.client.conftest import Rank, load, store, until
from tests.fakes.fake_daemon import Behaviour

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.fake_daemon import FakeDaemon

LEASE = lease_id_of(Behaviour().boot_id, 7)


def drained(rank: Rank, jobs: int) -> Completions:
    """Drain until so many results are there; one too many would show."""
    stores, loads = [], []

    def enough() -> bool:
        completions = rank.session.drain()
        stores.extend(completions.stores)
        loads.extend(completions.loads)
        return len(stores) + len(loads) >= jobs

    until(enough)
    assert len(stores) + len(loads) == jobs
    return Completions(tuple(stores), tuple(loads))


def failed(job_id: int, reason: Reason, blocks: int = 2) -> StoreResult:
    return StoreResult(job_id, failed=(ReasonCount(reason, blocks),), from_daemon=False)


def test_registration_carries_identity_pool_and_tickets(daemon: FakeDaemon, rank: Rank) -> None:
    """All that the daemon needs to map the pool is told, and each memory is offered once."""
    rank.up()
    assert [hello.role for hello in daemon.seen.hellos] == [handshake_pb2.SESSION_ROLE_RANK]
    kinds = [(offer.memory_index, offer.kind) for offer, _ in daemon.seen.offers]
    assert kinds == [(0, handshake_pb2.MEMORY_KIND_POOL), (1, handshake_pb2.MEMORY_KIND_TICKETS)]
    assert os.fstat(daemon.seen.offers[1][1]).st_size == rank.tickets.memory.size_bytes
    (registration,) = daemon.seen.registrations
    assert (registration.instance.id, registration.instance.nonce) == ("engine-a", "nonce-1")
    assert {f.name: f.value for f in registration.namespace.fields} == {
        "model": "m",
        "dtype": "f32",
    }
    assert registration.rank.ticket_memory_index == 1
    assert (registration.rank.ticket_cells, registration.rank.pool_blocks) == (32, 16)


def test_stores_and_loads_come_back_once(daemon: FakeDaemon, rank: Rank) -> None:
    """A step goes out as one message, and its outcomes come back by job id."""
    rank.up()
    rank.session.hand_over(Step((store(1), store(2, 3)), (load(3, LEASE),), (9,)))
    completions = drained(rank, 3)
    assert completions.stores == (StoreResult(1, stored=2), StoreResult(2, stored=3))
    assert [(result.job_id, result.reason) for result in completions.loads] == [(3, None)]
    (step,) = daemon.seen.steps
    assert list(step.revoked_job_ids) == [9]
    assert [block.block_id for block in step.stores[1].blocks] == [0, 1, 2]
    (job,) = step.loads
    assert (job.lease_id, list(job.block_ids)) == (7, [3, 4])
    assert 0 < job.deadline_ms <= 5000


def test_nothing_to_do_leaves_no_trace(daemon: FakeDaemon, rank: Rank) -> None:
    """An empty step sends nothing, and an empty drain makes nothing."""
    rank.up()
    rank.session.hand_over(Step())
    assert rank.session.drain() is NO_COMPLETIONS
    rank.session.hand_over(Step((store(1),)))
    drained(rank, 1)
    assert len(daemon.seen.steps) == 1


def test_before_start_and_after_close_jobs_fail_at_once(daemon: FakeDaemon, rank: Rank) -> None:
    """No daemon is asked, and the results are there when hand_over returns."""
    rank.session.hand_over(Step((store(1),)))
    assert rank.session.drain().stores == (failed(1, Reason.NOT_CONNECTED),)
    rank.up()
    rank.session.close()
    assert rank.session.state is SessionState.CLOSED
    rank.session.hand_over(Step((store(2),), (load(3, LEASE),)))
    completions = rank.session.drain()
    assert completions.stores == (failed(2, Reason.NOT_CONNECTED),)
    assert [result.reason for result in completions.loads] == [Reason.NOT_CONNECTED]
    assert daemon.seen.steps == []
    assert rank.session.counts.jobs_not_connected == 3


def test_more_jobs_than_may_be_in_flight_fail_at_once(
    start_daemon: Callable[..., FakeDaemon], rank: Rank
) -> None:
    """Loads are taken first; what is beyond the daemon's limit is answered by the session."""
    start_daemon(Behaviour(jobs_in_flight_max=2, stores="never"))
    rank.up()
    rank.session.hand_over(Step((store(1), store(2)), (load(3, LEASE),)))
    completions = drained(rank, 2)
    assert completions.stores == (failed(2, Reason.OVERLOADED),)
    assert [result.job_id for result in completions.loads] == [3]
    rank.session.hand_over(Step((store(4), store(5))))
    assert rank.session.drain().stores == (failed(5, Reason.OVERLOADED),)


def test_a_job_over_the_limits_is_never_sent(daemon: FakeDaemon, rank: Rank) -> None:
    """Sent, it would break the protocol and cost the session."""
    rank.up()
    rank.session.hand_over(Step((store(1, 65), store(2))))
    results = {result.job_id: result for result in drained(rank, 2).stores}
    assert results[1] == failed(1, Reason.OVER_LIMIT, 65)
    assert results[2] == StoreResult(2, stored=2)
    assert [job.job_id for job in daemon.seen.steps[0].stores] == [2]


def test_another_daemons_lease_is_not_loaded(daemon: FakeDaemon, rank: Rank) -> None:
    """Its number may by now stand for other blocks, whose bytes would be the wrong ones."""
    rank.up()
    rank.session.hand_over(Step(loads=(load(1, lease_id_of(b"\x02" * 16, 7)),)))
    (result,) = drained(rank, 1).loads
    assert (result.reason, result.from_daemon) == (Reason.LEASE_NOT_FOUND, False)
    assert daemon.seen.steps == []


def test_a_load_past_its_deadline_is_not_sent(daemon: FakeDaemon, rank: Rank) -> None:
    rank.up()
    rank.session.hand_over(Step(loads=(load(1, LEASE, time_s=-0.1),)))
    (result,) = drained(rank, 1).loads
    assert (result.reason, result.from_daemon) == (Reason.DEADLINE, False)
    assert daemon.seen.steps == []


def test_outcomes_that_come_twice_count_once(
    start_daemon: Callable[..., FakeDaemon], rank: Rank
) -> None:
    start_daemon(Behaviour(stores="twice"))
    rank.up()
    rank.session.hand_over(Step((store(1),), (load(2, LEASE),)))
    drained(rank, 2)
    until(lambda: rank.session.counts.outcomes_unexpected == 2)
    assert rank.session.drain() is NO_COMPLETIONS


def test_outcomes_of_jobs_never_handed_over_are_dropped(
    start_daemon: Callable[..., FakeDaemon], rank: Rank
) -> None:
    daemon = start_daemon(Behaviour(stores="invented"))
    rank.up()
    rank.session.hand_over(Step((store(1),)))
    until(lambda: rank.session.counts.outcomes_unexpected == 1)
    daemon.do.stores = "stored"
    rank.session.hand_over(Step((store(2),)))
    assert drained(rank, 1).stores == (StoreResult(2, stored=2),)


def test_an_outcome_that_does_not_add_up_fails_the_whole_job(
    start_daemon: Callable[..., FakeDaemon], rank: Rank
) -> None:
    """Three of two blocks stored: nothing of that may be believed."""
    start_daemon(Behaviour(stores="malformed"))
    rank.up()
    rank.session.hand_over(Step((store(1),)))
    assert drained(rank, 1).stores == (failed(1, Reason.PROTOCOL),)
    assert rank.session.counts.outcomes_malformed == 1


def test_a_newer_daemons_reason_is_a_failure_unknown(
    start_daemon: Callable[..., FakeDaemon], rank: Rank
) -> None:
    start_daemon(Behaviour(stores="strange"))
    rank.up()
    rank.session.hand_over(Step((store(1),)))
    expected = StoreResult(1, failed=(ReasonCount(Reason.UNKNOWN, 2),))
    assert drained(rank, 1).stores == (expected,)


@pytest.mark.parametrize("end", ["close_streams", "drop_handshakes"])
def test_a_lost_connection_answers_all_open_jobs_and_comes_back(
    daemon: FakeDaemon, rank: Rank, end: str
) -> None:
    """Jobs end as lost, not from the daemon; the next connection has a later epoch."""
    daemon.do.stores = daemon.do.loads = "never"
    rank.up()
    rank.session.hand_over(Step((store(1),), (load(2, LEASE),)))
    daemon.wait_for(lambda seen: seen.steps)
    getattr(daemon, end)()
    completions = drained(rank, 2)
    assert completions.stores == (failed(1, Reason.CONNECTION_LOST),)
    (lost,) = completions.loads
    assert (lost.reason, lost.from_daemon) == (Reason.CONNECTION_LOST, False)
    daemon.wait_for(lambda seen: len(seen.epochs) == 2)
    assert daemon.seen.epochs == sorted(set(daemon.seen.epochs))
    assert rank.session.wait_until(SessionState.UP, 20)
    assert rank.session.status.outages == 1
    # What was lost is not sent again.
    daemon.do.stores = "stored"
    rank.session.hand_over(Step((store(3),)))
    drained(rank, 1)
    assert [job.job_id for job in daemon.seen.steps[-1].stores] == [3]


def test_a_daemon_that_does_not_read_costs_the_connection_only(
    start_daemon: Callable[..., FakeDaemon], rank: Rank
) -> None:
    """A write that cannot go on is bounded; the engine's thread never feels it."""
    daemon = start_daemon(Behaviour(reads=False, jobs_in_flight_max=100_000))
    rank.up()
    hashes = tuple(bytes(2000) for _ in range(64))
    jobs = 0

    def lost() -> bool:
        nonlocal jobs
        jobs += 1
        work = store(jobs, 64)
        rank.session.hand_over(Step((type(work)(jobs, 1, 0, 0, 0, b"", hashes, work.block_ids),)))
        return rank.session.status.outages >= 1 or jobs > 2000

    until(lost)
    daemon.do.reads = True
    until(lambda: rank.session.status.outages >= 1)
    drained(rank, jobs)


def test_a_closing_stream_takes_nothing_new_and_ends_what_runs(
    daemon: FakeDaemon, rank: Rank
) -> None:
    """Drain: outcomes still count, new jobs are answered at once."""
    daemon.do.stores = "never"
    rank.up()
    rank.session.hand_over(Step((store(1),)))
    daemon.wait_for(lambda seen: seen.steps)
    closing = offload_pb2.StreamClosing(reason="draining")
    outcome = offload_pb2.StoreOutcome(job_id=1, blocks_stored=2)
    completions = offload_pb2.Completions(stores=[outcome])
    daemon.send(offload_pb2.RankReply(closing=closing))
    daemon.send(offload_pb2.RankReply(completions=completions))
    assert drained(rank, 1).stores == (StoreResult(1, stored=2),)
    rank.session.hand_over(Step((store(2),)))
    assert rank.session.drain().stores == (failed(2, Reason.NOT_CONNECTED),)


def test_close_waits_for_open_stores_and_says_goodbye(daemon: FakeDaemon, rank: Rank) -> None:
    """What an engine stored in its last step is not lost with its session."""
    daemon.do.stores = "never"
    rank.up()
    rank.session.hand_over(Step((store(1),)))
    daemon.wait_for(lambda seen: seen.steps)
    outcome = offload_pb2.StoreOutcome(job_id=1, blocks_stored=2)
    reply = offload_pb2.RankReply(completions=offload_pb2.Completions(stores=[outcome]))
    closing = rank.session.start_close(5.0)
    daemon.send(reply)
    assert closing.wait(20)
    assert rank.session.drain().stores == (StoreResult(1, stored=2),)
    daemon.wait_for(lambda seen: seen.stream_goodbyes and seen.goodbyes)


def test_close_is_bounded_when_a_store_never_ends(daemon: FakeDaemon, rank: Rank) -> None:
    """The result is there, as lost, and the daemon still hears goodbye."""
    daemon.do.stores = "never"
    rank.up()
    rank.session.hand_over(Step((store(1),)))
    daemon.wait_for(lambda seen: seen.steps)
    rank.session.close(0.5)
    rank.session.close(0.5)
    assert rank.session.wait_until(SessionState.CLOSED, 20)
    assert rank.session.drain().stores == (failed(1, Reason.CONNECTION_LOST),)
    daemon.wait_for(lambda seen: seen.goodbyes)


def test_hand_over_from_one_thread_while_the_daemon_comes_and_goes(
    daemon: FakeDaemon, rank: Rank
) -> None:
    """Each of some thousand jobs has exactly one result, however the losses fall."""
    rank.up()
    handed, seen_ids = 0, []
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.02):
            daemon.close_streams()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for job_id in range(1, 1500):
            rank.session.hand_over(Step((store(job_id),)))
            handed += 1
            seen_ids += [result.job_id for result in rank.session.drain().stores]
    finally:
        stop.set()
        disturber.join()
    rank.session.close(2.0)
    seen_ids += [result.job_id for result in rank.session.drain().stores]
    assert sorted(seen_ids) == list(range(1, handed + 1))

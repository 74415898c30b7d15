"""A scheduler's session: every lookup has a result, and no lease is left with nobody."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvoffd_client.lease_ids import lease_id_of
from kvoffd_client.ports import LookupResult, Reason, RenewFailed, SessionState
from kvoffd_proto.v1 import offload_pb2
from tests.client.conftest import until
from tests.fakes.fake_daemon import Behaviour

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd_client.ports import PendingLookup
    from kvoffd_client.scheduler_session import SchedulerSession
    from tests.fakes.fake_daemon import FakeDaemon

HASHES = tuple(bytes([number]) * 32 for number in range(4))
BOOT_ID = Behaviour().boot_id


def up(scheduler: SchedulerSession) -> None:
    scheduler.start()
    assert scheduler.wait_until(SessionState.UP, 20), scheduler.status


def result_of(pending: PendingLookup) -> LookupResult:
    until(lambda: pending.result is not None)
    assert pending.result is not None
    return pending.result


def test_a_hit_brings_a_lease_with_a_deadline(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    """The deadline is reckoned from before the request left."""
    up(scheduler)
    before_s = time.monotonic()
    result = result_of(scheduler.start_lookup(1, 0, HASHES))
    assert (result.hit_blocks, result.reason) == (4, None)
    assert result.lease_id == lease_id_of(BOOT_ID, daemon.seen.lookups[0].number)
    assert result.lease_deadline_s is not None
    assert before_s + 10 <= result.lease_deadline_s <= time.monotonic() + 10
    (message,) = daemon.seen.lookups
    assert (message.lookup.hashes, message.lookup.hash_bytes) == (b"".join(HASHES), 32)


@pytest.mark.parametrize(
    ("lookups", "expected"),
    [
        ("miss", LookupResult()),
        ("silent", LookupResult(reason=Reason.DEADLINE)),
        ("error", LookupResult(reason=Reason.STALE_GENERATION)),
        ("leaseless", LookupResult(reason=Reason.PROTOCOL)),
    ],
)
def test_what_is_no_hit_is_a_miss(
    daemon: FakeDaemon, scheduler: SchedulerSession, lookups: str, expected: LookupResult
) -> None:
    """Blocks without a lease count for nothing, and a daemon that is silent for a time limit."""
    daemon.do.lookups = lookups
    up(scheduler)
    assert result_of(scheduler.start_lookup(1, 0, HASHES)) == expected


def test_not_connected_is_a_miss_at_once(scheduler: SchedulerSession) -> None:
    scheduler.start()
    assert scheduler.start_lookup(1, 0, HASHES).result == LookupResult(reason=Reason.NOT_CONNECTED)
    assert scheduler.renew(lease_id_of(BOOT_ID, 1)).failed is RenewFailed.NOT_CONNECTED
    assert (scheduler.accepting, scheduler.generation) == (False, None)


def test_hashes_of_unequal_length_are_never_sent(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    up(scheduler)
    result = result_of(scheduler.start_lookup(1, 0, (b"a" * 32, b"b" * 31)))
    assert result == LookupResult(reason=Reason.PROTOCOL)
    assert daemon.seen.lookups == []


def test_an_abandoned_result_gives_its_lease_back(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    up(scheduler)
    pending = scheduler.start_lookup(1, 0, HASHES)
    result_of(pending)
    pending.abandon()
    daemon.wait_for(lambda seen: seen.releases == [seen.lookups[0].number])


def test_a_late_reply_to_an_abandoned_lookup_gives_its_lease_back(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    daemon.do.lookups = "silent"
    up(scheduler)
    pending = scheduler.start_lookup(1, 0, HASHES)
    daemon.wait_for(lambda seen: seen.lookups)
    pending.abandon()
    # A reply to a later request shows that the abandoning has been taken in.
    renewal = scheduler.renew(lease_id_of(BOOT_ID, 5))
    until(lambda: renewal.lease_deadline_s is not None)
    found = offload_pb2.LookupResponse(hit_blocks=4, lease_id=77, lease_ttl_ms=1000)
    number = daemon.seen.lookups[0].number
    daemon.send_prefix(offload_pb2.PrefixReply(number=number, lookup=found))
    daemon.wait_for(lambda seen: seen.releases == [77])
    assert pending.result is None


def test_a_reply_past_the_time_limit_gives_its_lease_back(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    daemon.do.lookups = "silent"
    up(scheduler)
    pending = scheduler.start_lookup(1, 0, HASHES)
    assert result_of(pending).reason is Reason.DEADLINE
    found = offload_pb2.LookupResponse(hit_blocks=4, lease_id=78, lease_ttl_ms=1000)
    number = daemon.seen.lookups[0].number
    daemon.send_prefix(offload_pb2.PrefixReply(number=number, lookup=found))
    daemon.wait_for(lambda seen: seen.releases == [78])
    assert pending.result == LookupResult(reason=Reason.DEADLINE)


def test_leases_of_another_daemon_are_neither_renewed_nor_released(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    """Their numbers may be another request's by now."""
    up(scheduler)
    foreign = lease_id_of(b"\x02" * 16, 5)
    scheduler.release([foreign, lease_id_of(BOOT_ID, 6)])
    renewal = scheduler.renew(foreign)
    until(lambda: renewal.failed is not None)
    daemon.wait_for(lambda seen: seen.releases)
    assert renewal.failed is RenewFailed.LEASE_NOT_FOUND
    assert (daemon.seen.releases, daemon.seen.renewals) == ([6], [])


def test_a_lost_connection_ends_lookups(daemon: FakeDaemon, scheduler: SchedulerSession) -> None:
    daemon.do.lookups = "silent"
    up(scheduler)
    pending = scheduler.start_lookup(1, 0, HASHES)
    daemon.wait_for(lambda seen: seen.lookups)
    daemon.close_streams()
    assert result_of(pending) == LookupResult(reason=Reason.CONNECTION_LOST)


def test_a_confirmed_reset_shows_the_new_generation(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    up(scheduler)
    assert scheduler.generation == 1
    assert scheduler.reset(10.0) is True
    assert (scheduler.generation, scheduler.accepting) == (2, True)
    assert scheduler.reset(10.0) is True
    assert (scheduler.generation, daemon.seen.resets) == (3, 2)


def test_an_unanswered_reset_is_owed_and_paid_at_the_next_connection(
    daemon: FakeDaemon, scheduler: SchedulerSession
) -> None:
    """Until then nothing is looked up: what is found could be of before the reset."""
    daemon.do.resets = "silent"
    up(scheduler)
    assert scheduler.reset(0.1) is False
    assert scheduler.start_lookup(1, 0, HASHES).result == LookupResult(reason=Reason.NOT_CONNECTED)
    assert scheduler.generation is None
    daemon.do.resets = "answer"
    daemon.close_streams()
    until(lambda: scheduler.accepting)
    assert scheduler.status.connects >= 2
    assert scheduler.generation is not None
    assert scheduler.generation > 1


def test_a_reset_without_a_daemon_is_owed(
    start_daemon: Callable[..., FakeDaemon], scheduler: SchedulerSession
) -> None:
    """It answers at once, and the debt is paid before anything is accepted."""
    scheduler.start()
    assert scheduler.reset(30.0) is False
    daemon = start_daemon()
    until(lambda: scheduler.accepting)
    assert daemon.seen.resets == 1
    assert scheduler.generation == 2


def test_the_instance_is_complete_when_the_daemon_says_so(
    start_daemon: Callable[..., FakeDaemon], scheduler: SchedulerSession
) -> None:
    daemon = start_daemon(Behaviour(complete=False))
    up(scheduler)
    daemon.wait_for(lambda seen: seen.heartbeats >= 2)
    assert scheduler.instance_complete is False
    daemon.do.complete = True
    until(lambda: scheduler.instance_complete)


def test_another_engines_reset_is_heard(daemon: FakeDaemon, scheduler: SchedulerSession) -> None:
    up(scheduler)
    daemon.do.generation = 9
    until(lambda: scheduler.generation == 9)


def test_close_says_goodbye(daemon: FakeDaemon, scheduler: SchedulerSession) -> None:
    up(scheduler)
    scheduler.close(2.0)
    daemon.wait_for(lambda seen: seen.goodbyes == ["closed by the engine"])
    assert scheduler.start_lookup(1, 0, HASHES).result == LookupResult(reason=Reason.NOT_CONNECTED)
    assert scheduler.reset() is False

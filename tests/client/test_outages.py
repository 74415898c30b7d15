"""Daemons that are absent, frozen, killed, rude or wrong: no hang, no noise, no lost job."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvoffd_client.lease_ids import lease_id_of
from kvoffd_client.ports import Reason, SessionState, Step
from kvoffd_proto.v1 import handshake_pb2
from tests.client.conftest import Rank, load, store, until
from tests.fakes.fake_daemon import Behaviour

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd_client.scheduler_session import SchedulerSession
    from tests.client.conftest import DaemonProcess
    from tests.fakes.fake_daemon import FakeDaemon


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_daemon_that_comes_later_is_found(
    start_daemon: Callable[..., FakeDaemon], rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for the whole absence, however many tries it takes."""
    rank.session.start()
    until(lambda: rank.session.state is SessionState.ABSENT)
    until(lambda: warnings_of(caplog))
    until(lambda: rank.session.status.attempts > 2)
    start_daemon()
    assert rank.session.wait_until(SessionState.UP, 20)
    (warning,) = warnings_of(caplog)
    assert "no daemon at" in warning


def test_the_wait_at_start_ends_with_the_first_attempt(
    start_daemon: Callable[..., FakeDaemon], rank: Rank
) -> None:
    """Absent, it is known at once; there but slow, it is waited for. Longer than any test lasts."""
    assert rank.session.wait_for_first_attempt(600) is False  # not even started
    rank.session.start()
    assert rank.session.wait_for_first_attempt(600) is False
    assert "no daemon at" in rank.session.status.reason
    daemon = start_daemon(Behaviour(register="silent"))
    until(lambda: daemon.seen.registrations)
    assert rank.session.wait_for_first_attempt(0.01) is False
    assert rank.session.state is SessionState.CONNECTING
    daemon.do.register = "accept"
    until(lambda: rank.session.wait_for_first_attempt(600))
    rank.session.close()
    assert rank.session.wait_for_first_attempt(600) is False


def test_a_frozen_daemon_is_lost_and_found_again(
    start_process: Callable[[], DaemonProcess],
    rank: Rank,
    scheduler: SchedulerSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SIGSTOP: heartbeats go unanswered, all that is open ends, and SIGCONT brings it back."""
    process = start_process()
    rank.up()
    scheduler.start()
    assert scheduler.wait_until(SessionState.UP, 20)
    process.freeze()
    rank.session.hand_over(Step((store(1),)))
    pending = scheduler.start_lookup(1, 0, (b"h" * 32,))
    until(lambda: pending.result is not None)
    results = []
    until(lambda: results.extend(rank.session.drain().stores) or results)
    assert results[0].failed[0].reason is Reason.CONNECTION_LOST
    assert rank.session.state is not SessionState.UP
    # While it is frozen, the engine's thread is answered at once, and close is bounded.
    rank.session.hand_over(Step((store(2),)))
    assert rank.session.drain().stores[0].failed[0].reason is Reason.NOT_CONNECTED
    assert scheduler.reset(30.0) is False
    process.thaw()
    assert rank.session.wait_until(SessionState.UP, 20)
    until(lambda: scheduler.accepting)
    assert len(warnings_of(caplog)) == 2


def test_close_is_bounded_while_the_daemon_is_frozen(
    start_process: Callable[[], DaemonProcess], rank: Rank
) -> None:
    process = start_process()
    rank.up()
    process.freeze()
    rank.session.hand_over(Step((store(1),)))
    assert rank.session.start_close(0.5).wait(20)
    (result,) = rank.session.drain().stores
    assert result.failed[0].reason is Reason.CONNECTION_LOST


def test_a_killed_daemon_is_noticed_and_its_successor_found(
    start_process: Callable[[], DaemonProcess], rank: Rank
) -> None:
    """The socket file stays behind, and the next daemon has another boot id."""
    process = start_process()
    rank.up()
    process.kill()
    until(lambda: rank.session.status.outages == 1)
    start_process()
    assert rank.session.wait_until(SessionState.UP, 20)
    rank.session.hand_over(Step((store(1),)))
    results = []
    until(lambda: results.extend(rank.session.drain().stores) or results)
    assert results[0].stored == 2


@pytest.mark.parametrize("hello", ["silent", "close", "garbage", "flood"])
def test_a_bad_handshake_is_survived(
    start_daemon: Callable[..., FakeDaemon], rank: Rank, hello: str
) -> None:
    daemon = start_daemon(Behaviour(hello=hello))
    rank.session.start()
    until(lambda: rank.session.state is SessionState.ABSENT)
    daemon.do.hello = "welcome"
    assert rank.session.wait_until(SessionState.UP, 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heartbeat_boot_id", b"\x09" * 16),
        ("stream_boot_id", b"\x09" * 16),
        ("opening", "silent"),
        ("opening", "close"),
        ("opening", "completions"),
        ("heartbeat", "silent"),
        ("register", "silent"),
        ("register", "UNAVAILABLE"),
        ("register", "ALREADY_EXISTS"),
        ("offers", "silent"),
    ],
)
def test_a_daemon_that_behaves_badly_once_is_tried_again(
    start_daemon: Callable[..., FakeDaemon], rank: Rank, field: str, value: object
) -> None:
    """It never counts as up for good, and as soon as it behaves it does."""
    daemon = start_daemon()
    setattr(daemon.do, field, value)
    rank.session.start()
    daemon.wait_for(lambda seen: len(seen.hellos) >= 2)
    setattr(daemon.do, field, getattr(Behaviour(), field))
    until(lambda: rank.session.state is SessionState.UP)
    beats = daemon.seen.heartbeats
    daemon.wait_for(lambda seen: seen.heartbeats > beats + 1)
    until(lambda: rank.session.state is SessionState.UP)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("hello", "refuse", "you may not (FORBIDDEN)"),
        ("offers", "refuse", "it can shrink (MEMORY)"),
        ("register", "INVALID_ARGUMENT", "not like this (INVALID_ARGUMENT)"),
        ("register", "FAILED_PRECONDITION", "not like this (FAILED_PRECONDITION)"),
    ],
)
def test_what_retrying_cannot_cure_is_refused_with_one_warning(
    start_daemon: Callable[..., FakeDaemon],
    rank: Rank,
    caplog: pytest.LogCaptureFixture,
    field: str,
    value: str,
    sentence: str,
) -> None:
    """The daemon's own sentence is shown, and it is left alone for a long while."""
    daemon = start_daemon()
    setattr(daemon.do, field, value)
    rank.session.start()
    assert rank.session.wait_until(SessionState.REFUSED, 20)
    (warning,) = warnings_of(caplog)
    assert sentence in warning
    assert len(daemon.seen.hellos) == 1
    rank.session.hand_over(Step((store(1),)))
    assert rank.session.drain().stores[0].failed[0].reason is Reason.NOT_CONNECTED


def test_closing_with_a_reason_is_a_loss_that_says_why(
    daemon: FakeDaemon, rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.up()
    daemon.do.hello = "silent"
    daemon.close_sessions(handshake_pb2.CLOSE_CODE_DRAINING, "it will be back")
    until(lambda: warnings_of(caplog))
    assert "it will be back (DRAINING)" in warnings_of(caplog)[0]


@pytest.mark.parametrize("payload", [b"\xff\xff", b"\x00" * 10, b"\x12\x02\x08\x63"])
def test_garbage_on_an_open_handshake_costs_the_connection(
    daemon: FakeDaemon, rank: Rank, payload: bytes
) -> None:
    """Not a frame, and one that accepts a memory that was never offered."""
    rank.up()
    daemon.send_raw(payload)
    until(lambda: rank.session.status.outages == 1)
    assert rank.session.wait_until(SessionState.UP, 20)


def test_copiers_are_kept_and_seen(daemon: FakeDaemon, rank: Rank) -> None:
    """CopierSeen goes back, and a copier is gone exactly when its pidfd says so."""
    rank.up()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as copier:
        pidfd = os.pidfd_open(copier.pid)
        daemon.copier_up(3, [pidfd])
        os.close(pidfd)
        daemon.wait_for(lambda seen: seen.copiers_seen == [3])
        daemon.do.loads = "never"
        rank.session.hand_over(Step(loads=(load(1, lease_id_of(daemon.do.boot_id, 1), cell=4),)))
        daemon.wait_for(lambda seen: seen.steps)
        assert rank.session.copier_gone(4, 3) is False
        assert rank.session.copier_gone(4, 2) is False
        assert rank.session.copier_gone(5, 3) is False
        daemon.drop_handshakes()
        until(lambda: rank.session.status.outages == 1)
        copier.kill()
    # The book of the lost connection still answers for the cell.
    until(lambda: rank.session.copier_gone(4, 3))
    assert rank.session.copier_gone(5, 3) is False


def test_hand_over_costs_microseconds_while_nobody_answers(
    start_process: Callable[[], DaemonProcess], rank: Rank
) -> None:
    """No figure is asserted but one so wide that only waiting could break it."""
    process = start_process()
    rank.up()
    process.freeze()
    began_s = time.thread_time()
    for job_id in range(1, 1001):
        rank.session.hand_over(Step((store(job_id),)))
        rank.session.drain()
    assert time.thread_time() - began_s < 1.0
    process.thaw()

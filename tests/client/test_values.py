"""The client's pure parts: ledger, paths, lease ids, messages, back-off."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffd_client import paths
from kvoffd_client.descriptions import SessionOptions
from kvoffd_client.errors import ClientError, DaemonAbsent, MemoryFailed, Refused, SessionClosed
from kvoffd_client.lease_ids import lease_id_of, lease_number
from kvoffd_client.ledger import Ledger, LedgerTotals
from kvoffd_client.memory import SharedMemory
from kvoffd_client.messages import load_result, step_message, store_result
from kvoffd_client.ports import LoadResult, Reason, ReasonCount, Step, StoreResult
from kvoffd_client.reconnect import Backoff
from kvoffd_proto.v1 import offload_pb2
from tests.client.conftest import load, store


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-1, 6), st.integers(0, 4)), max_size=30))
def test_the_ledger_balances_after_any_results(jobs: list[tuple[int, int, int]]) -> None:
    """Whatever is told of a job, right or wrong, once or twice, its blocks count once."""
    ledger = Ledger()
    for job_id, (blocks, stored, reasons) in enumerate(jobs, start=1):
        ledger.submit(job_id, blocks)
        rejected = tuple(ReasonCount(Reason.NO_SLOT, 1) for _ in range(reasons))
        if reasons != 4:
            assert ledger.settle(StoreResult(job_id, stored=stored, rejected=rejected))
            assert not ledger.settle(StoreResult(job_id, stored=stored))
        ledger.assert_balanced()
    totals = ledger.totals()
    assert totals.submitted == sum(blocks for blocks, _, _ in jobs)
    assert totals.in_flight == sum(blocks for blocks, _, reasons in jobs if reasons == 4)


def test_the_ledger_names_every_end() -> None:
    ledger = Ledger()
    for job_id in range(1, 7):
        ledger.submit(job_id, 3)
    failed = (ReasonCount(Reason.REVOKED, 1),)
    rejected = (ReasonCount(Reason.NO_SLOT, 1),)
    ledger.settle(StoreResult(1, stored=1, rejected=rejected, failed=failed))
    ledger.settle(StoreResult(2, present=3))
    ledger.reject(3, "reused")
    ledger.fail(4, "forward_raised")
    ledger.settle(StoreResult(5, stored=4))
    assert not ledger.fail(99, "whatever")
    assert ledger.totals() == LedgerTotals(
        submitted=18,
        stored=1,
        present=3,
        rejected={"no_slot": 1, "reused": 3},
        failed={"revoked": 1, "forward_raised": 3, "malformed": 3},
        in_flight=3,
        results_unexpected=1,
        results_malformed=1,
    )
    assert ledger.is_open(6)


def test_a_ledger_that_lost_blocks_says_so() -> None:
    """The check can fail: blocks that vanish from the figures are noticed."""
    ledger = Ledger()
    ledger.submit(1, 2)
    ledger._submitted += 1
    with pytest.raises(AssertionError, match="does not balance"):
        ledger.assert_balanced()
    with pytest.raises(AssertionError, match="twice"):
        ledger.submit(1, 2)


def test_the_socket_path_is_argument_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVOFFD_SOCKET", "/run/a.sock")
    assert paths.socket_path("/run/b.sock") == "/run/b.sock"
    assert paths.socket_path() == "/run/a.sock"
    monkeypatch.delenv("KVOFFD_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    assert paths.socket_path() == "/run/user/5/kvoffd/kvoffd.sock"
    assert paths.default_socket_path(0, None) == "/run/kvoffd/kvoffd.sock"
    assert paths.default_socket_path(5, None) == "/tmp/kvoffd-5/kvoffd.sock"
    assert paths.handshake_path("/run/a.sock") == "/run/a.sock.handshake"


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    """107 bytes with the suffix are possible, one more is not."""
    fits = "/" + "a" * 96
    assert paths.socket_path(fits) == fits
    with pytest.raises(ClientError, match="108"):
        paths.socket_path(fits + "a")


@given(st.binary(min_size=16, max_size=16), st.integers(1, 2**64 - 1))
def test_a_lease_id_is_its_daemons_alone(boot_id: bytes, number: int) -> None:
    lease_id = lease_id_of(boot_id, number)
    assert lease_number(boot_id, lease_id) == number
    other = bytes([boot_id[0] ^ 1]) + boot_id[1:]
    assert lease_number(other, lease_id) is None


def test_steps_of_one_message_keep_their_order() -> None:
    boot_id = b"b" * 16
    steps = [
        Step((store(1),), (), ()),
        Step((store(2),), (load(3, lease_id_of(boot_id, 9)),), (1,)),
    ]
    message = step_message(steps, boot_id, now_s=0.0)
    assert [job.job_id for job in message.step.stores] == [1, 2]
    assert [(job.job_id, job.lease_id) for job in message.step.loads] == [(3, 9)]
    assert list(message.step.revoked_job_ids) == [1]


@pytest.mark.parametrize("value", offload_pb2.UnstoredReason.values()[1:])
def test_every_reason_of_the_protocol_is_known(value: int) -> None:
    """Below 100 is rejected, from 100 failed; none is unknown to us."""
    part = offload_pb2.UnstoredBlocks(reason=value, blocks=2)
    result = store_result(offload_pb2.StoreOutcome(job_id=1, unstored=[part]), 2)
    assert result is not None
    (count,) = result.rejected if value < 100 else result.failed
    name = offload_pb2.UnstoredReason.Name(value).removeprefix("UNSTORED_REASON_").lower()
    assert (count.reason, count.blocks) == (name, 2)


@pytest.mark.parametrize("value", offload_pb2.LoadStatus.values())
def test_only_loaded_is_loaded(value: int) -> None:
    result = load_result(offload_pb2.LoadOutcome(job_id=1, status=value))
    name = offload_pb2.LoadStatus.Name(value).removeprefix("LOAD_STATUS_").lower()
    expected = {"loaded": None, "unspecified": Reason.UNKNOWN}
    assert result == LoadResult(1, expected[name] if name in expected else Reason(name))


def test_pauses_grow_with_jitter_and_have_a_floor_and_a_bound() -> None:
    clock_s = [0.0]
    options = SessionOptions("s", clock=lambda: clock_s[0], jitter=random.Random(1).random)
    backoff = Backoff(options)
    pauses_s = [backoff.failed(SessionClosed("x"), was_up=False)[1] for _ in range(40)]
    assert all(0.01 <= pause_s <= 5.0 for pause_s in pauses_s)
    assert max(pauses_s[:3]) <= 0.2
    assert max(pauses_s) > 2.5
    assert backoff.failed(DaemonAbsent("x"), was_up=False)[1] <= 1.5
    # Up for a moment is no success; up for long is.
    backoff = Backoff(replace(options, jitter=lambda: 1.0))
    for _ in range(10):
        backoff.failed(SessionClosed("x"), was_up=False)
    backoff.went_up()
    assert backoff.failed(SessionClosed("x"), was_up=True) == (False, 5.0)
    backoff.went_up()
    clock_s[0] += 60
    assert backoff.failed(SessionClosed("x"), was_up=True) == (False, 0.05)


def test_refusals_wait_long_and_curable_ones_only_after_many() -> None:
    backoff = Backoff(SessionOptions("s", jitter=lambda: 0.5))
    assert backoff.failed(Refused("VERSION", "too old"), was_up=False) == (True, 45.0)
    backoff.went_up()
    curable = Refused("ALREADY_EXISTS", "there is one", curable=True)
    refused = [backoff.failed(curable, was_up=False)[0] for _ in range(13)]
    assert refused == [False] * 12 + [True]
    draining = Refused("DRAINING", "back in a moment", curable=True)
    assert [backoff.failed(draining, was_up=False)[0] for _ in range(20)] == [False] * 20


def test_shared_memory_that_cannot_be_had_is_a_sentence() -> None:
    with pytest.raises(MemoryFailed, match="positive size"):
        SharedMemory.create("x", 0)
    with pytest.raises(MemoryFailed, match=f"{2**64} bytes for x"):
        SharedMemory.create("x", 2**64)

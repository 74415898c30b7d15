"""Both sessions against the daemon itself: bytes go out, come back, and are the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvoffd_client.ports import LoadWork, SessionState, Step, StoreResult
from kvoffd_client.tickets import LoadProof
from tests.client.conftest import BLOCK_BYTES, ROOT, Rank, store, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffd_client.ports import Completions, LookupResult
    from kvoffd_client.scheduler_session import SchedulerSession


class RealDaemon:
    """`kvoffd serve` with a small arena."""

    def __init__(self, socket_path: str) -> None:
        arguments = ["serve", "--socket", socket_path, "--arena-bytes", "64MiB"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvoffd.main", *arguments],
            cwd=ROOT,
            env={"PYTHONPATH": "client:proto:.", "PATH": os.environ["PATH"]},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        until(Path(socket_path + ".handshake").exists)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def start_real(socket_path: str) -> Iterator[Callable[[], RealDaemon]]:
    with contextlib.ExitStack() as stack:

        def start() -> RealDaemon:
            daemon = RealDaemon(socket_path)
            stack.callback(daemon.end, signal.SIGKILL)
            return daemon

        yield start


class Engine:
    """A rank and a scheduler of one instance, and what a test does with them."""

    def __init__(self, rank: Rank, scheduler: SchedulerSession) -> None:
        self.rank, self.scheduler = rank, scheduler
        self.job_ids = 0

    def up(self) -> None:
        self.rank.session.start()
        self.scheduler.start()
        self.wait_until_complete()

    def wait_until_complete(self) -> None:
        until(lambda: self.rank.session.state is SessionState.UP)
        until(lambda: self.scheduler.instance_complete)

    def fill(self, block_id: int, byte: int) -> None:
        buffer = self.rank.pool.buffer
        buffer[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES] = bytes([byte]) * BLOCK_BYTES

    def block(self, block_id: int) -> set[int]:
        buffer = self.rank.pool.buffer
        return set(buffer[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES])

    def results(self) -> Completions:
        found: list[Completions] = []

        def any_result() -> bool:
            completions = self.rank.session.drain()
            if completions.stores or completions.loads:
                found.append(completions)
            return bool(found)

        until(any_result)
        return found[0]

    def store(self, hashes_of: int) -> StoreResult:
        """Store blocks 0 and 1 under the hashes of a job of that number."""
        self.job_ids += 1
        cell = self.rank.tickets.allocate(self.job_ids)
        assert cell is not None
        work = store(hashes_of)
        generation = self.scheduler.generation or 0
        bell = self.rank.tickets.next_bell
        job = type(work)(
            self.job_ids, generation, 0, cell, bell, b"", work.block_hashes, work.block_ids
        )
        self.rank.session.hand_over(Step((job,)))
        self.rank.tickets.ring()
        (result,) = self.results().stores
        self.rank.tickets.free(cell)
        return result

    def lookup(self, hashes_of: int) -> LookupResult:
        generation = self.scheduler.generation or 0
        pending = self.scheduler.start_lookup(generation, 0, store(hashes_of).block_hashes)
        until(lambda: pending.result is not None)
        assert pending.result is not None
        return pending.result

    def load(self, lease_id: int, block_ids: tuple[int, ...]) -> LoadProof:
        """Load a lease's blocks and say what the ticket page proves of it."""
        self.job_ids += 1
        cell = self.rank.tickets.allocate(self.job_ids)
        assert cell is not None
        generation = self.scheduler.generation or 0
        deadline_s = time.monotonic() + 10
        self.rank.session.hand_over(
            Step(
                loads=(
                    LoadWork(self.job_ids, generation, cell, 0, lease_id, 0, block_ids, deadline_s),
                )
            )
        )
        self.results()
        proofs: list[LoadProof] = []
        until(lambda: proofs.append(self.rank.tickets.try_end_load(cell)) or proofs[-1].is_final)
        self.rank.tickets.free(cell)
        return proofs[-1]


@pytest.fixture
def engine(rank: Rank, scheduler: SchedulerSession) -> Engine:
    return Engine(rank, scheduler)


def test_what_is_stored_comes_back_byte_by_byte(
    start_real: Callable[[], RealDaemon], engine: Engine
) -> None:
    """The load's proof is the ticket page, and the other blocks are untouched."""
    start_real()
    engine.up()
    engine.fill(0, 0xA0)
    engine.fill(1, 0xA1)
    assert (engine.store(1).stored, engine.store(1).present) == (2, 2)
    result = engine.lookup(1)
    assert result.hit_blocks == 2
    assert result.lease_id is not None
    assert engine.load(result.lease_id, (5, 7)) is LoadProof.LOADED
    assert (engine.block(5), engine.block(7)) == ({0xA0}, {0xA1})
    assert (engine.block(4), engine.block(6)) == ({0}, {0})


def test_after_a_reset_nothing_is_found(
    start_real: Callable[[], RealDaemon], engine: Engine
) -> None:
    start_real()
    engine.up()
    engine.store(1)
    before = engine.scheduler.generation
    assert engine.scheduler.reset(10.0) is True
    assert engine.scheduler.generation != before
    assert engine.lookup(1).hit_blocks == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_is_replaced_without_a_word_to_the_engine(
    start_real: Callable[[], RealDaemon], engine: Engine, number: signal.Signals
) -> None:
    """Its leases mean nothing to the next daemon, even where the numbers agree."""
    daemon = start_real()
    engine.up()
    engine.store(1)
    old_lease_id = engine.lookup(1).lease_id
    assert old_lease_id is not None
    daemon.end(number)
    until(lambda: engine.rank.session.status.outages == 1)
    until(lambda: engine.scheduler.status.outages == 1)
    start_real()
    engine.wait_until_complete()
    engine.fill(0, 0xB0)
    assert engine.store(2).stored == 2
    assert engine.lookup(2).lease_id != old_lease_id
    assert engine.load(old_lease_id, (5, 7)) is LoadProof.UNTOUCHED
    assert engine.block(5) == {0}


def test_a_frozen_daemon_thaws_into_a_new_session(
    start_real: Callable[[], RealDaemon], engine: Engine
) -> None:
    """The daemon lets the old registration of the same process go and takes the new one."""
    daemon = start_real()
    engine.up()
    daemon.process.send_signal(signal.SIGSTOP)
    until(lambda: engine.rank.session.status.outages == 1)
    until(lambda: engine.scheduler.status.outages == 1)
    daemon.process.send_signal(signal.SIGCONT)
    engine.wait_until_complete()
    assert engine.store(3).stored == 2


def test_a_block_fenced_before_its_copy_is_never_found(
    start_real: Callable[[], RealDaemon], engine: Engine
) -> None:
    """The cell is revoked before the bell rings: whatever was copied is thrown away."""
    start_real()
    engine.up()
    tickets = engine.rank.tickets
    cell = tickets.allocate(99)
    assert cell is not None
    work = store(4)
    generation = engine.scheduler.generation or 0
    job = type(work)(99, generation, 0, cell, 1, b"", work.block_hashes, work.block_ids)
    engine.rank.session.hand_over(Step((job,)))
    tickets.revoke(cell)
    tickets.ring()
    (result,) = engine.results().stores
    assert (result.stored, result.present) == (0, 0)
    assert engine.lookup(4).hit_blocks == 0

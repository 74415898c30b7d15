"""Stores, lookups and loads of real bytes, through a real daemon and a real copier."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.raw_client import Place, Rank, Scheduler

if TYPE_CHECKING:
    from tests.fakes.daemon_process import DaemonProcess


@pytest.mark.parametrize("ranks_total", [1, 2])
def test_stored_blocks_are_found_and_loaded(daemon: DaemonProcess, ranks_total: int) -> None:
    async def scenario() -> None:
        place = Place(
            instance=f"roundtrip-{ranks_total}",
            ranks_total=ranks_total,
            namespace={"ranks": str(ranks_total)},
        )
        numbers = list(range(100, 110))
        async with AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
            await scheduler.join()
            ranks = []
            for index in range(ranks_total):
                rank = await stack.enter_async_context(Rank(daemon.socket_path, place, index))
                await rank.join()
                ranks.append(rank)
            for rank in ranks:
                for number in numbers:
                    rank.pool.fill(number - 100, number * 10 + rank.rank)
            # All but the last rank have stored: nothing is ready yet.
            for rank in ranks[:-1]:
                await rank.step(stores=[rank.store_job(1, numbers, range(10))])
            assert (await scheduler.lookup(numbers)).hit_blocks == 0
            await ranks[-1].step(stores=[ranks[-1].store_job(1, numbers, range(10))])
            for rank in ranks:
                assert (await rank.outcome(1)).blocks_stored == 10
            found = await scheduler.lookup([*numbers, 999])
            assert found.hit_blocks == 10
            assert found.lease_ttl_ms > 0
            for rank in ranks:
                status = await rank.load(2, found.lease_id, list(range(20, 30)))
                assert status == pb.LOAD_STATUS_LOADED
                for number in numbers:
                    expected = rank.pool.content(number * 10 + rank.rank)
                    assert rank.pool.read(number - 80) == expected
                assert rank.tickets.state(2) == 2
            status = await daemon.settled(sessions=1 + ranks_total)
            assert status.cache.blocks_ready >= 10
        await daemon.settled()

    asyncio.run(scenario())

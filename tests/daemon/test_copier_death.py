"""Copiers that are killed or stuck: jobs end, the engine hears why, the daemon goes on."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvoffd_proto.v1 import handshake_pb2
from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.bystander import watched
from tests.fakes.raw_client import Place, Rank, Scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.daemon_process import DaemonProcess


@asynccontextmanager
async def engine(daemon: DaemonProcess, name: str) -> AsyncIterator[tuple[Rank, Scheduler]]:
    """A rank and its scheduler half, joined, with blocks 1 to 4 stored."""
    place = Place(name, namespace={"model": name})
    async with (
        Rank(daemon.socket_path, place) as rank,
        Scheduler(daemon.socket_path, place) as scheduler,
    ):
        await scheduler.join()
        await rank.join()
        assert (await rank.store(1, [1, 2, 3, 4], [0, 1, 2, 3])).blocks_stored == 4
        yield rank, scheduler


async def kill_copier(daemon: DaemonProcess, number: int = signal.SIGKILL) -> int:
    # 0 between two processes, and a signal to that would be for ourselves.
    await daemon.eventually(lambda status: status.copiers[0].pid != 0)
    pid = (await daemon.status()).copiers[0].pid
    assert pid
    os.kill(pid, number)
    return pid


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


@pytest.mark.parametrize("turn", range(3))
def test_killed_with_jobs_in_flight(daemon: DaemonProcess, turn: int) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            rank, scheduler = await stack.enter_async_context(engine(daemon, f"killed-{turn}"))
            lease_id = (await scheduler.lookup([1, 2])).lease_id
            await rank.step(
                stores=[
                    rank.store_job(job_id, [job_id * 10], [job_id], bell=job_id % 2)
                    for job_id in range(10, 20)
                ],
                loads=[rank.load_job(30, lease_id, [40, 41], bell=1)],
            )
            incarnation = rank.incarnation
            await kill_copier(daemon)
            for job_id in range(10, 20):
                outcome = await rank.outcome(job_id)
                reasons = [lost.reason for lost in outcome.unstored]
                if job_id % 2:
                    assert reasons == [pb.UNSTORED_REASON_COPIER]
                assert outcome.blocks_stored + len(reasons) == 1
            assert await rank.outcome(30) == pb.LOAD_STATUS_COPIER
            # The client can see that the process is gone, and gets the next one's pidfd.
            assert is_readable(rank.copier_pidfds[0])
            await rank.see_copier()
            assert rank.incarnation != incarnation
            assert not is_readable(rank.copier_pidfds[1])
            # What was stored is still there, and the pool is open again.
            assert (await rank.store(31, [500], [5])).blocks_stored == 1
            found = await scheduler.lookup([1, 2, 3, 4])
            assert found.hit_blocks == 4
            assert await rank.load(32, found.lease_id, [50, 51, 52, 53]) == pb.LOAD_STATUS_LOADED
            assert [rank.pool.read(block_id) for block_id in range(50, 54)] == [
                rank.pool.content(number) for number in (1, 2, 3, 4)
            ]
            status = await daemon.settled(sessions=2)
            assert status.copiers[0].restarts > turn
            assert status.copiers[0].state == "up"

    asyncio.run(scenario())


def test_loads_wait_until_the_client_has_seen_the_copier(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with engine(daemon, "unseen") as (rank, scheduler):
            await kill_copier(daemon)
            reply, fds = await rank.handshake.receive()
            assert reply is not None
            rank.copier_pidfds += fds
            waits = (await scheduler.lookup([1, 2])).lease_id
            late = (await scheduler.lookup([3])).lease_id
            await rank.step(
                loads=[
                    rank.load_job(2, waits, [10, 11]),
                    rank.load_job(3, late, [12], deadline_ms=100),
                ]
            )
            assert await rank.outcome(3) == pb.LOAD_STATUS_DEADLINE
            assert rank.tickets.state(2) == 0
            assert 2 not in rank.loads
            # Another number is no confirmation of this one.
            for incarnation in (1, reply.copier_up.incarnation):
                assert rank.tickets.state(2) == 0
                rank.handshake.send(copier_seen=handshake_pb2.CopierSeen(incarnation=incarnation))
            assert await rank.outcome(2) == pb.LOAD_STATUS_LOADED
        await daemon.settled()

    asyncio.run(scenario())


def test_copier_that_is_stuck_over_a_load_is_killed(own_daemon: DaemonProcess) -> None:
    own_daemon.set(overdue_kill_s=0.5)
    own_daemon.start()

    async def scenario() -> None:
        async with engine(own_daemon, "stuck") as (rank, scheduler):
            stopped = await kill_copier(own_daemon, signal.SIGSTOP)
            lease_id = (await scheduler.lookup([1, 2])).lease_id
            await rank.step(loads=[rank.load_job(2, lease_id, [10, 11], deadline_ms=200)])
            assert await rank.outcome(2) == pb.LOAD_STATUS_COPIER
            await rank.see_copier()
            status = await own_daemon.status()
            assert status.copiers[0].pid != stopped
            assert (await rank.store(3, [9], [9])).blocks_stored == 1
        await own_daemon.settled()

    asyncio.run(scenario())
    assert own_daemon.stop() == 0


def test_killed_while_ranks_come_and_go(daemon: DaemonProcess) -> None:
    """No registration hangs, and no pool stays behind, whatever moment the copier dies at."""

    async def come_and_go(number: int) -> None:
        place = Place(f"come-{number}", namespace={"model": "come"})
        async with Rank(daemon.socket_path, place) as rank:
            await rank.say_hello(handshake_pb2.SESSION_ROLE_RANK)
            await rank.offer_all()
            await asyncio.gather(rank.register(), kill_copier(daemon), return_exceptions=True)

    async def scenario() -> None:
        # After each death the pause before the next start is twice as long.
        for number in range(3):
            await come_and_go(number)
        await daemon.eventually(lambda status: status.copiers[0].state == "up")
        await daemon.settled()
        async with watched(daemon):
            pass

    asyncio.run(scenario())

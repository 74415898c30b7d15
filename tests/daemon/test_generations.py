"""Resets, fences, limits and lapses: every block is accounted for, and nothing stale is used."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from kvoffd_proto.v1 import handshake_pb2
from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.raw_client import Place, Rank, Scheduler, block_hash

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.daemon_process import DaemonProcess


@asynccontextmanager
async def engine(
    daemon: DaemonProcess, name: str, ranks_total: int = 1
) -> AsyncIterator[tuple[Scheduler, list[Rank]]]:
    """A scheduler half and its ranks, joined."""
    place = Place(name, ranks_total=ranks_total, namespace={"model": name})
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
        await scheduler.join()
        ranks = [
            await stack.enter_async_context(Rank(daemon.socket_path, place, index))
            for index in range(ranks_total)
        ]
        for rank in ranks:
            await rank.join()
        yield scheduler, ranks
    await daemon.settled()


def reasons(outcome: pb.StoreOutcome) -> dict[int, int]:
    return {lost.reason: lost.blocks for lost in outcome.unstored}


async def reset(scheduler: Scheduler) -> pb.ResetResponse:
    answer: pb.ResetResponse = await scheduler.call("Reset", pb.ResetRequest())
    scheduler.generation = answer.generation
    return answer


def test_reset_makes_everything_stale(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with engine(daemon, "reset") as (scheduler, [rank]):
            await rank.store(1, [1, 2], [0, 1])
            loaded = (await scheduler.lookup([1, 2])).lease_id
            unused = (await scheduler.lookup([1, 2])).lease_id
            await rank.step(
                stores=[rank.store_job(2, [3], [3], bell=1)],
                loads=[rank.load_job(3, loaded, [10, 11], bell=1)],
            )
            # The lookups and this call are on other streams: wait until the step is in.
            await daemon.eventually(lambda status: status.cache.loads_in_flight == 1)
            old_generation = scheduler.generation
            answer = await reset(scheduler)
            assert (answer.generation, answer.blocks_dropped) == (old_generation + 1, 2)
            assert reasons(await rank.outcome(2)) == {pb.UNSTORED_REASON_GENERATION_MOVED: 1}
            rank.tickets.ring(1)
            assert await rank.outcome(3) == pb.LOAD_STATUS_STALE_GENERATION
            assert await rank.load(4, unused, [12, 13]) == pb.LOAD_STATUS_STALE_GENERATION
            stale = await rank.store(5, [4], [4])
            assert reasons(stale) == {pb.UNSTORED_REASON_STALE_GENERATION: 1}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scheduler.call("Lookup", scheduler.lookup_request([1], generation=1))
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert (await scheduler.lookup([1, 2])).hit_blocks == 0
            beat = await scheduler.call("Heartbeat", pb.HeartbeatRequest())
            assert beat.generation == answer.generation
            rank.generation = answer.generation
            assert (await rank.store(6, [1, 2], [0, 1])).blocks_stored == 2
            assert (await scheduler.lookup([1, 2])).hit_blocks == 2

    asyncio.run(scenario())


def test_reset_before_any_rank_has_come(daemon: DaemonProcess) -> None:
    """Jobs that were decided before it are stale, although the namespace was not there yet."""

    async def scenario() -> None:
        place = Place("early-reset", namespace={"model": "early-reset"})
        async with (
            Scheduler(daemon.socket_path, place) as scheduler,
            Rank(daemon.socket_path, place) as rank,
        ):
            await scheduler.join()
            assert (await scheduler.lookup([1])).hit_blocks == 0
            first_generation = scheduler.generation
            await reset(scheduler)
            await reset(scheduler)
            await rank.join()
            assert rank.generation == scheduler.generation == first_generation + 2
            rank.generation = first_generation
            outcome = await rank.store(1, [1], [0])
            assert reasons(outcome) == {pb.UNSTORED_REASON_STALE_GENERATION: 1}
        await daemon.settled()

    asyncio.run(scenario())


def test_fences(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with engine(daemon, "fences", ranks_total=2) as (scheduler, ranks):
            first, second = ranks
            # By the ticket alone: copied, and thrown away.
            for rank in ranks:
                await rank.step(stores=[rank.store_job(1, [1, 2], [0, 1], bell=1)])
            first.tickets.revoke(1)
            for rank in ranks:
                rank.tickets.ring(1)
            for rank in ranks:
                assert reasons(await rank.outcome(1)) == {pb.UNSTORED_REASON_REVOKED: 2}
            # By the hint: at once, although the bell never rings.
            for rank in ranks:
                await rank.step(stores=[rank.store_job(2, [1, 2], [0, 1], bell=9)])
            await first.step(revoked_job_ids=[2, 77])
            for rank in ranks:
                assert reasons(await rank.outcome(2)) == {pb.UNSTORED_REASON_REVOKED: 2}
            # By the hint of a rank that never hands it over, before the other one does.
            await first.step(revoked_job_ids=[3])
            await first.step(stores=[first.store_job(4, [5], [5], generation=0)])
            await first.outcome(4)
            await second.step(stores=[second.store_job(3, [1, 2], [0, 1])])
            assert reasons(await second.outcome(3)) == {pb.UNSTORED_REASON_REVOKED: 2}
            assert (await scheduler.lookup([1])).hit_blocks == 0
            # A parked load.
            for rank in ranks:
                await rank.step(stores=[rank.store_job(5, [1, 2], [0, 1])])
            for rank in ranks:
                assert (await rank.outcome(5)).blocks_stored == 2
            lease_id = (await scheduler.lookup([1, 2])).lease_id
            await first.step(loads=[first.load_job(6, lease_id, [10, 11], bell=9)])
            await first.step(revoked_job_ids=[6])
            assert await first.outcome(6) == pb.LOAD_STATUS_REVOKED
            await scheduler.call("Release", pb.ReleaseRequest(lease_ids=[lease_id]))

    asyncio.run(scenario())


def test_the_same_block_from_two_engines(daemon: DaemonProcess) -> None:
    """The second one waits for the first, and takes over when the first gives up."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            ranks = []
            for name in ("one", "other"):
                place = Place(name, namespace={"model": "shared"})
                rank = await stack.enter_async_context(Rank(daemon.socket_path, place))
                await rank.join()
                ranks.append(rank)
            first, second = ranks
            for rank in ranks:
                rank.pool.fill(0, 1)
                rank.pool.fill(1, 2)
            await first.step(stores=[first.store_job(1, [1, 2], [0, 1], bell=1)])
            await daemon.eventually(lambda status: status.cache.blocks_pending == 2)
            await second.step(stores=[second.store_job(1, [1, 2], [0, 1])])
            await second.step(stores=[second.store_job(2, [3], [2], generation=0)])
            await second.outcome(2)
            assert 1 not in second.stores
            await first.step(revoked_job_ids=[1])
            assert reasons(await first.outcome(1)) == {pb.UNSTORED_REASON_REVOKED: 2}
            assert (await second.outcome(1)).blocks_stored == 2
            assert (await first.store(2, [1, 2], [0, 1])).blocks_present == 2
        await daemon.settled()

    asyncio.run(scenario())


def test_limits_and_lapses(own_daemon: DaemonProcess) -> None:
    own_daemon.set(jobs_in_flight_max=3, lease_ttl_s=0.5, heartbeat_s=0.1, store_deadline_s=1.5)
    own_daemon.start()

    async def scenario() -> None:
        async with engine(own_daemon, "limits") as (scheduler, [rank]):
            await rank.store(1, [1, 2], [0, 1])
            kept, lapsing = [(await scheduler.lookup([1, 2])).lease_id for _ in range(2)]
            await rank.step(
                stores=[rank.store_job(job_id, [job_id], [5], bell=1) for job_id in range(10, 14)]
            )
            assert reasons(await rank.outcome(13)) == {pb.UNSTORED_REASON_OVERLOADED: 1}
            await rank.step(loads=[rank.load_job(20, kept, [8, 9])])
            assert await rank.outcome(20) == pb.LOAD_STATUS_OVERLOADED
            # No bell rings: the stores end by their deadline, the lease that nobody renews.
            stream = scheduler.offload.Prefix(metadata=scheduler.metadata)
            ended = asyncio.ensure_future(rank.outcome(10))
            while not ended.done():
                await stream.write(pb.PrefixMessage(number=1, renew=pb.RenewRequest(lease_id=kept)))
                assert (await stream.read()).renew.lease_ttl_ms == 500
                await asyncio.wait([ended], timeout=0.1)
            assert reasons(ended.result()) == {pb.UNSTORED_REASON_DEADLINE: 1}
            await stream.write(pb.PrefixMessage(number=2, renew=pb.RenewRequest(lease_id=lapsing)))
            reply = await stream.read()
            assert (reply.number, reply.error.code) == (2, grpc.StatusCode.NOT_FOUND.value[0])
            for job_id in (11, 12):
                await rank.outcome(job_id)
            assert await rank.load(21, kept, [8, 9]) == pb.LOAD_STATUS_LOADED
            stream.cancel()

    asyncio.run(scenario())
    assert own_daemon.stop() == 0


def test_more_blocks_than_there_is_room_for(own_daemon: DaemonProcess) -> None:
    """A full arena takes the new and drops the old; what it cannot take it says."""
    own_daemon.set(arena_bytes="4MiB", extent_bytes="1MiB")
    own_daemon.start()

    async def scenario() -> None:
        async with engine(own_daemon, "room") as (scheduler, [rank]):
            for job_id in range(1, 60):
                numbers = range(job_id * 100, job_id * 100 + 16)
                outcome = await rank.store(job_id, numbers, range(16))
                assert outcome.blocks_stored == 16, outcome
                found = await scheduler.lookup(numbers)
                assert found.hit_blocks == 16
                status = await rank.load(job_id + 1000, found.lease_id, list(range(20, 36)))
                assert status == pb.LOAD_STATUS_LOADED
                assert rank.pool.read(35) == rank.pool.content(numbers[15])
            status = await own_daemon.status()
            assert status.cache.evicted_blocks > 0
            # Everything is leased: nothing may go.
            leases = []
            for job_id in range(1, 60):
                numbers = range(job_id * 100, job_id * 100 + 16)
                leases.append((await scheduler.lookup(numbers)).lease_id)
            outcome = await rank.store(2000, range(10), range(10))
            full = outcome.blocks_stored + reasons(outcome)[pb.UNSTORED_REASON_NO_SLOT]
            assert full == 10, outcome
            held = [lease_id for lease_id in leases if lease_id]
            release = await scheduler.call("Release", pb.ReleaseRequest(lease_ids=held))
            assert release.released == len(held)

    asyncio.run(scenario())
    assert own_daemon.stop() == 0


def test_parents_and_a_scheduler_half_that_starts_again(
    daemon: DaemonProcess,
) -> None:
    async def scenario() -> None:
        async with engine(daemon, "parents") as (scheduler, [rank]):
            await rank.store(1, [1], [0])
            job = rank.store_job(2, [2], [1], parent_hash=block_hash(1))
            await rank.step(stores=[job])
            assert (await rank.outcome(2)).blocks_stored == 1
            assert (await scheduler.lookup([1, 2])).hit_blocks == 2
            # The same process may start its scheduler half again.
            async with Scheduler(daemon.socket_path, scheduler.place) as again:
                await again.join()
                closing = await scheduler.handshake.closing()
                assert closing.code == handshake_pb2.CLOSE_CODE_PROTOCOL
                assert (await again.lookup([1, 2])).hit_blocks == 2

    asyncio.run(scenario())

"""Clients that are killed: whatever they were doing, all of it is cleaned up within seconds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from kvoffd_proto.v1 import handshake_pb2
from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.bystander import watched
from tests.fakes.raw_client import Place, Rank, Scheduler
from tests.fakes.raw_process import NUMBERS, POINTS, Victim

if TYPE_CHECKING:
    from tests.fakes.daemon_process import DaemonProcess

TWO = {"model": "victim 2"}


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point(daemon: DaemonProcess, point: str) -> None:
    async def scenario() -> None:
        async with watched(daemon):
            victim = Victim(daemon, "killed", point)
            try:
                await victim.there()
            finally:
                victim.kill()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_some_moment(daemon: DaemonProcess, seed: int) -> None:
    dice = random.Random(seed)

    async def scenario() -> None:
        async with watched(daemon):
            for turn in range(3):
                victim = Victim(daemon, f"moment-{turn}", "working")
                try:
                    await victim.there()
                    await asyncio.sleep(dice.random() * 0.1)
                finally:
                    victim.kill()

    asyncio.run(scenario())


def test_frozen_client_keeps_its_place_and_a_dead_one_gives_it_up(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), AsyncExitStack() as stack:
            victim = Victim(daemon, "frozen", "stream open")
            place = Place("frozen", namespace={"model": "victim 1"})
            try:
                await victim.there()
                os.kill(victim.pid, signal.SIGSTOP)
                rank = await stack.enter_async_context(Rank(daemon.socket_path, place))
                await rank.say_hello(handshake_pb2.SESSION_ROLE_RANK)
                await rank.offer_all()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rank.register()
                assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
                assert str(victim.pid) in (caught.value.details() or "")
            finally:
                victim.kill()
            # The daemon need not have noticed the death before we come.
            await rank.register()
            await rank.see_copier()
            await rank.open_stream()
            assert (await rank.store(1, [9_000_001], [0])).blocks_stored == 1

    asyncio.run(scenario())


def test_one_of_two_ranks_dies_over_a_store_and_comes_back(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), AsyncExitStack() as stack:
            place = Place("pair", ranks_total=2, namespace=TWO)
            rank = await stack.enter_async_context(Rank(daemon.socket_path, place, 0))
            scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
            await rank.join()
            await scheduler.join()
            rejected = await rank.store(100, [1], [0])
            assert [lost.reason for lost in rejected.unstored] == [pb.UNSTORED_REASON_NOT_COMPLETE]
            for attempt in (1, 2):
                victim = Victim(daemon, "pair", "store parked", rank=1, ranks_total=2)
                try:
                    await victim.there()
                    # Its job 1 is ours as well; another one waits for its blocks.
                    job_id = attempt if attempt == 1 else 50
                    await rank.step(stores=[rank.store_job(job_id, NUMBERS, range(32))])
                    beat = await scheduler.call("Heartbeat", pb.HeartbeatRequest())
                    assert beat.instance_complete
                finally:
                    victim.kill()
                outcome = await rank.outcome(job_id)
                assert sum(lost.blocks for lost in outcome.unstored) == 32, outcome
                # The end of its stream may be seen before the end of its process.
                assert {lost.reason for lost in outcome.unstored} <= {
                    pb.UNSTORED_REASON_RANK_LOST,
                    pb.UNSTORED_REASON_REVOKED,
                }
                assert (await scheduler.lookup(NUMBERS)).hit_blocks == 0
            other = await stack.enter_async_context(Rank(daemon.socket_path, place, 1))
            await other.join()
            for member in (rank, other):
                await member.step(stores=[member.store_job(60, NUMBERS, range(32))])
            for member in (rank, other):
                assert (await member.outcome(60)).blocks_stored == 32
            assert (await scheduler.lookup(NUMBERS)).hit_blocks == 32

    asyncio.run(scenario())


def test_blocks_whose_dead_rank_had_copied_its_part_are_kept(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), AsyncExitStack() as stack:
            place = Place("kept", ranks_total=2, namespace=TWO | {"case": "kept"})
            scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
            await scheduler.join()
            rank = await stack.enter_async_context(Rank(daemon.socket_path, place, 0))
            await rank.join()
            async with Rank(daemon.socket_path, place, 1) as leaver:
                await leaver.join()
                await rank.step(stores=[rank.store_job(1, [1, 2], [0, 1], bell=1)])
                await leaver.step(stores=[leaver.store_job(1, [1, 2], [0, 1])])
                # Its own next store has ended, so the first one's copies have, too.
                await leaver.step(stores=[leaver.store_job(2, [3], [3], generation=0)])
                await leaver.outcome(2)
                await daemon_has_batches(daemon, 1)
            rank.tickets.ring(1)
            assert (await rank.outcome(1)).blocks_stored == 2
            assert (await scheduler.lookup([1, 2])).hit_blocks == 2

    asyncio.run(scenario())


def test_lost_stream_ends_its_jobs_and_not_its_session(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("stream")) as rank:
            await rank.join()
            job = rank.store_job(1, [7001], [0], bell=1)
            await rank.step(stores=[job])
            await daemon_has_batches(daemon, 1)
            rank.stream.cancel()
            await daemon_has_batches(daemon, 0)
            await rank.open_stream(epoch=2)
            # Sent again it is what it was: revoked. A new one is a new one.
            await rank.step(stores=[job])
            outcome = await rank.outcome(1)
            assert [(lost.reason, lost.blocks) for lost in outcome.unstored] == [
                (pb.UNSTORED_REASON_REVOKED, 1)
            ]
            assert (await rank.store(2, [7002], [0])).blocks_stored == 1

    asyncio.run(scenario())


def test_goodbye_waits_for_what_was_handed_over(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("goodbye")) as rank:
            await rank.join()
            await rank.step(stores=[rank.store_job(1, [7101], [0], bell=1)])
            await rank.send(goodbye=pb.StreamGoodbye(reason="shutdown"))
            await rank.stream.done_writing()
            rank.tickets.ring(1)
            assert (await rank.outcome(1)).blocks_stored == 1
            assert (await rank.receive()).WhichOneof("message") == "closing"
            assert await rank.stream.code() is grpc.StatusCode.OK

    asyncio.run(scenario())


async def daemon_has_batches(daemon: DaemonProcess, batches: int) -> None:
    """Until so many batches of clients that do not move are in flight, for some looks."""
    async with asyncio.timeout(20):
        seen = 0
        while seen < 3:
            status = await daemon.status()
            seen = seen + 1 if status.copiers[0].batches_in_flight == batches else 0
            await asyncio.sleep(0.01)

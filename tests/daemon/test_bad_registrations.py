"""Bad registrations: refused with a status and a sentence, and free to be mended."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from kvoffd_proto.v1 import handshake_pb2
from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.bystander import watched
from tests.fakes.raw_client import Place, Rank, Scheduler
from tests.fakes.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.daemon_process import DaemonProcess

Code = grpc.StatusCode


def small_stride(rank: Rank) -> pb.RankRegistration:
    regions = rank.pool.regions()
    regions[1].block_stride_bytes = 100
    return rank.registration(regions=regions)


def region_beyond_memory(rank: Rank) -> pb.RankRegistration:
    regions = rank.pool.regions()
    regions[2].offset_bytes += 1
    return rank.registration(regions=regions)


def huge_region(rank: Rank) -> pb.RankRegistration:
    regions = rank.pool.regions()
    regions[0].offset_bytes = (1 << 64) - 1
    return rank.registration(regions=regions)


REGISTRATIONS: dict[str, Callable[[Rank], pb.RankRegistration]] = {
    "rank too high": lambda rank: rank.registration(rank=7),
    "no such device": lambda rank: rank.registration(device="cuda:0"),
    "no device": lambda rank: rank.registration(device=""),
    "tickets not offered": lambda rank: rank.registration(ticket_memory_index=9),
    "tickets in the pool": lambda rank: rank.registration(ticket_memory_index=0),
    "no cells": lambda rank: rank.registration(ticket_cells=0),
    "more cells than the page has": lambda rank: rank.registration(ticket_cells=65),
    "other cells than the page says": lambda rank: rank.registration(ticket_cells=63),
    "no blocks": lambda rank: rank.registration(pool_blocks=0),
    "too many blocks": lambda rank: rank.registration(pool_blocks=(1 << 32) - 1),
    "a block too many": lambda rank: rank.registration(pool_blocks=65),
    "no regions": lambda rank: rank.registration(regions=[]),
    "too many regions": lambda rank: rank.registration(regions=rank.pool.regions() * 1000),
    "memory not offered": lambda rank: rank.registration(regions=rank.pool.regions(5)),
    "pool in the tickets": lambda rank: rank.registration(regions=rank.pool.regions(1)),
    "empty region": lambda rank: rank.registration(regions=[pb.Region(block_stride_bytes=8)]),
    "blocks overlap": small_stride,
    "region beyond memory": region_beyond_memory,
    "huge region": huge_region,
}


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_bad_registration_of_a_rank_can_be_mended(daemon: DaemonProcess, name: str) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("bad-rank")) as rank:
            await rank.say_hello(handshake_pb2.SESSION_ROLE_RANK)
            await rank.offer_all()
            bad = rank.place.request(REGISTRATIONS[name](rank))
            assert await refusal(rank.call("Register", bad)) is Code.INVALID_ARGUMENT
            await rank.register()
            await rank.see_copier()
            await rank.open_stream()
            assert (await rank.store(1, [hash(name) & 0xFFFFFF], [0])).job_id == 1

    asyncio.run(scenario())


def test_bad_registration_of_a_place(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), Scheduler(daemon.socket_path, Place("bad-place")) as session:
            await session.say_hello(handshake_pb2.SESSION_ROLE_SCHEDULER)
            good = session.place.request()
            for change in (
                {"instance": pb.Instance(nonce="n")},
                {"instance": pb.Instance(id="i")},
                {"instance": pb.Instance(id="i" * 1000, nonce="n")},
                {"namespace": pb.Namespace()},
                {"namespace": pb.Namespace(fields=[pb.NamespaceField(value="no name")])},
                {"namespace": pb.Namespace(fields=[pb.NamespaceField(name="twice")] * 2)},
                {"namespace": pb.Namespace(fields=[pb.NamespaceField(name="n", value="v" * 5000)])},
                {"ranks_total": 0},
                {"ranks_total": 1 << 31},
            ):
                bad = pb.RegisterRequest()
                bad.CopyFrom(good)
                for name, value in change.items():
                    bad.ClearField(name)  # type: ignore[arg-type] # a field's name
                    bad.MergeFrom(pb.RegisterRequest(**{name: value}))
                assert await refusal(session.call("Register", bad)) is Code.INVALID_ARGUMENT
            # As a rank, or twice, it breaks the protocol.
            await session.call("Register", good)
            twice = refusal(session.call("Register", good))
            assert await twice is Code.FAILED_PRECONDITION
            assert (await session.handshake.closing()).code == handshake_pb2.CLOSE_CODE_PROTOCOL

    asyncio.run(scenario())


def test_an_instance_has_one_description_and_each_place_one_process(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(watched(daemon))
            place = Place("one-description")
            rank = await stack.enter_async_context(Rank(daemon.socket_path, place))
            await rank.join()
            for other in (
                Place("one-description", namespace={"model": "another"}),
                Place("one-description", ranks_total=2),
            ):
                session = await stack.enter_async_context(Scheduler(daemon.socket_path, other))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await session.join()
                assert caught.value.code() is Code.ALREADY_EXISTS
            # The same process again replaces its own session, and the pool of before.
            again = await stack.enter_async_context(Rank(daemon.socket_path, place))
            await again.join()
            closing = await rank.handshake.closing()
            assert "again" in closing.reason
            assert (await again.store(1, [777], [0])).job_id == 1

    asyncio.run(scenario())

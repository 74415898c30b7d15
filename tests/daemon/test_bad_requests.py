"""Bad calls: a status and a sentence, and the session closed where it broke the protocol."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvoffd_proto.v1 import admin_pb2, handshake_pb2, offload_pb2
from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.bystander import watched
from tests.fakes.raw_client import Admin, Place, Rank, Scheduler, Session
from tests.fakes.refusals import is_open, refusal, stream_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.daemon_process import DaemonProcess

UNARY = {
    "Register": pb.RegisterRequest(),
    "Heartbeat": pb.HeartbeatRequest(),
    "Lookup": pb.LookupRequest(),
    "Renew": pb.RenewRequest(),
    "Release": pb.ReleaseRequest(),
    "Reset": pb.ResetRequest(),
    "Status": admin_pb2.StatusRequest(),
    "Instances": admin_pb2.InstancesRequest(),
    "Namespaces": admin_pb2.NamespacesRequest(),
}
STREAMS = ("Transfer", "Prefix")
Code = grpc.StatusCode


@pytest.mark.parametrize("token", [None, "", "0" * 32, "no-token-of-ours"])
def test_every_call_needs_a_session(daemon: DaemonProcess, token: str | None) -> None:
    async def scenario() -> None:
        async with watched(daemon), Session(daemon.socket_path) as session:
            metadata = [] if token is None else [("kvoffd-session", token)]
            for name, request in UNARY.items():
                service = session.admin if hasattr(session.admin, name) else session.offload
                call = getattr(service, name)(request, metadata=metadata)
                assert await refusal(call) is Code.UNAUTHENTICATED
            for name in STREAMS:
                stream = getattr(session.offload, name)(metadata=metadata)
                assert await stream_refusal(stream) is Code.UNAUTHENTICATED

    asyncio.run(scenario())


def test_each_role_has_its_calls(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(watched(daemon))
            place = Place("roles")
            rank = await stack.enter_async_context(Rank(daemon.socket_path, place))
            await rank.join()
            scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
            await scheduler.join()
            admin = await stack.enter_async_context(Admin(daemon.socket_path))
            await admin.join()
            denied = Code.PERMISSION_DENIED
            for name in ("Lookup", "Renew", "Release", "Reset"):
                rank_request = UNARY[name]
                if name == "Lookup":
                    rank_request = scheduler.lookup_request([1])
                if name == "Release":
                    rank_request = pb.ReleaseRequest(lease_ids=[1])
                assert await refusal(rank.call(name, rank_request)) is denied
            for name in ("Status", "Instances", "Namespaces"):
                assert await refusal(rank.call(name, UNARY[name])) is denied
            assert await refusal(admin.call("Register", place.request())) is denied
            stream = scheduler.offload.Transfer(metadata=scheduler.metadata)
            assert await stream_refusal(stream) is Code.FAILED_PRECONDITION
            assert await is_open(rank)
            assert await is_open(scheduler)

    asyncio.run(scenario())


#: Fields of a Step that no rank may send.
STEPS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "block id out of range": lambda rank: {"stores": [rank.store_job(1, [1, 2], [3, 64])]},
    "highest block id": lambda rank: {"stores": [rank.store_job(1, [1], [(1 << 32) - 1])]},
    "cell out of range": lambda rank: {"stores": [rank.store_job(1, [1], [1], ticket_cell=64)]},
    "job id zero": lambda rank: {"stores": [rank.store_job(0, [1], [1])]},
    "no blocks": lambda rank: {"stores": [rank.store_job(1, [], [])]},
    "too many blocks": lambda rank: {"stores": [rank.store_job(1, range(5000), [1] * 5000)]},
    "no such group": lambda rank: {"stores": [rank.store_job(1, [1], [1], group=9)]},
    "hash too long": lambda rank: {
        "stores": [rank.store_job(1, [], [], blocks=[pb.BlockRef(hash=b"h" * 33)])]
    },
    "hash missing": lambda rank: {
        "stores": [rank.store_job(1, [], [], blocks=[pb.BlockRef(block_id=1)])]
    },
    "hashes of two lengths": lambda rank: {
        "stores": [
            rank.store_job(1, [], [], blocks=[pb.BlockRef(hash=b"a"), pb.BlockRef(hash=b"bb")])
        ]
    },
    "parent of another length": lambda rank: {
        "stores": [rank.store_job(1, [1], [1], parent_hash=b"p")]
    },
    "block twice": lambda rank: {"stores": [rank.store_job(1, [1, 1], [1, 2])]},
    "job twice": lambda rank: {
        "stores": [rank.store_job(1, [1], [1]), rank.store_job(1, [1], [1])]
    },
    "load out of range": lambda rank: {"loads": [rank.load_job(1, 1, [64])]},
    "load of nothing": lambda rank: {"loads": [rank.load_job(1, 1, [])]},
    "load too long": lambda rank: {"loads": [rank.load_job(1, 1, [1] * 5000)]},
    "load without a deadline": lambda rank: {"loads": [rank.load_job(1, 1, [1], deadline_ms=0)]},
    "load cell out of range": lambda rank: {
        "loads": [rank.load_job(1, 1, [1], ticket_cell=1 << 31)]
    },
    "load to one block twice": lambda rank: {"loads": [rank.load_job(1, 1, [1, 1])]},
}


@pytest.mark.parametrize("name", STEPS)
def test_bad_step_ends_stream_and_session(daemon: DaemonProcess, name: str) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("bad-step")) as rank:
            await rank.join()
            await rank.step(**STEPS[name](rank))
            assert await stream_refusal(rank.stream) is Code.INVALID_ARGUMENT
            assert (await rank.handshake.closing()).code == handshake_pb2.CLOSE_CODE_PROTOCOL
            assert not await is_open(rank)

    asyncio.run(scenario())


def test_wrong_order_on_a_stream(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        messages = [
            pb.RankMessage(step=pb.Step()),
            pb.RankMessage(goodbye=pb.StreamGoodbye()),
            pb.RankMessage(),
        ]
        for first in messages:
            async with watched(daemon), Rank(daemon.socket_path, Place("order")) as rank:
                await rank.join()
                stream = rank.offload.Transfer(metadata=rank.metadata)
                await stream.write(first)
                assert await stream_refusal(stream) is Code.FAILED_PRECONDITION
                assert (await rank.handshake.closing()).code == handshake_pb2.CLOSE_CODE_PROTOCOL
        for later in (pb.RankMessage(open=pb.StreamOpen(epoch=9)), pb.RankMessage()):
            async with Rank(daemon.socket_path, Place("order")) as rank:
                await rank.join()
                await rank.stream.write(later)
                assert await stream_refusal(rank.stream) is Code.FAILED_PRECONDITION
                assert (await rank.handshake.closing()).code == handshake_pb2.CLOSE_CODE_PROTOCOL
        await daemon.settled()

    asyncio.run(scenario())


def test_stream_before_registration(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("early")) as rank:
            await rank.say_hello(handshake_pb2.SESSION_ROLE_RANK)
            for name in STREAMS:
                stream = getattr(rank.offload, name)(metadata=rank.metadata)
                assert await stream_refusal(stream) is Code.FAILED_PRECONDITION

    asyncio.run(scenario())


def test_epochs_strictly_increase(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("epochs")) as rank:
            await rank.join()
            first = rank.stream
            await rank.open_stream(epoch=5)
            # The older one is told that it was replaced.
            assert (await first.read()).closing.reason
            assert (await rank.store(1, [31], [0])).job_id == 1
            stale = rank.offload.Transfer(metadata=rank.metadata)
            await stale.write(pb.RankMessage(open=pb.StreamOpen(epoch=5)))
            assert await stream_refusal(stale) is Code.FAILED_PRECONDITION
            assert (await rank.handshake.closing()).code == handshake_pb2.CLOSE_CODE_PROTOCOL

    asyncio.run(scenario())


def test_job_id_with_other_blocks(daemon: DaemonProcess) -> None:
    """Of one rank in flight, and between two ranks of an instance."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(watched(daemon))
            place = Place("other-blocks", ranks_total=2, namespace={"model": "two"})
            ranks = [
                await stack.enter_async_context(Rank(daemon.socket_path, place, index))
                for index in range(2)
            ]
            for rank in ranks:
                await rank.join()
            await ranks[0].step(stores=[ranks[0].store_job(1, [1, 2], [0, 1])])
            await ranks[1].step(stores=[ranks[1].store_job(1, [1, 3], [0, 1])])
            assert await stream_refusal(ranks[1].stream) is Code.INVALID_ARGUMENT
            await ranks[1].handshake.closing()
            # The other rank hears that its job came to nothing.
            outcome = await ranks[0].outcome(1)
            assert [(lost.reason, lost.blocks) for lost in outcome.unstored] == [
                (pb.UNSTORED_REASON_RANK_LOST, 2)
            ]
            await ranks[0].step(stores=[ranks[0].store_job(2, [8], [0], bell=9)])
            await ranks[0].step(stores=[ranks[0].store_job(2, [9], [0], bell=9)])
            # No rank 1 any more: rejected, but a job all the same.
            assert await stream_refusal(ranks[0].stream) is Code.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_leases_that_are_not_ours(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(watched(daemon))
            ranks, schedulers = [], []
            for name in ("owner", "thief"):
                rank = await stack.enter_async_context(Rank(daemon.socket_path, Place(name)))
                await rank.join()
                ranks.append(rank)
                scheduler = Scheduler(daemon.socket_path, Place(name))
                schedulers.append(await stack.enter_async_context(scheduler))
                await scheduler.join()
            await ranks[0].store(1, [41, 42], [0, 1])
            lease_id = (await schedulers[0].lookup([41, 42])).lease_id
            thief, thief_rank = schedulers[1], ranks[1]
            assert lease_id
            for guess in (lease_id, 0, 12345, (1 << 64) - 1):
                renew = thief.call("Renew", pb.RenewRequest(lease_id=guess))
                assert await refusal(renew) is Code.NOT_FOUND
                release = await thief.call("Release", pb.ReleaseRequest(lease_ids=[guess]))
                assert release.released == 0
                status = await thief_rank.load(9, guess, [5])
                thief_rank.loads.clear()
                assert status == pb.LOAD_STATUS_LEASE_NOT_FOUND
            # Once a rank; then it is used up.
            assert await ranks[0].load(2, lease_id, [5, 6]) == pb.LOAD_STATUS_LOADED
            assert await ranks[0].load(3, lease_id, [5, 6]) == pb.LOAD_STATUS_LEASE_NOT_FOUND

    asyncio.run(scenario())


def test_load_beyond_its_lease_breaks_the_protocol(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(watched(daemon))
            place = Place("beyond")
            rank = await stack.enter_async_context(Rank(daemon.socket_path, place))
            scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
            await rank.join()
            await scheduler.join()
            await rank.store(1, [51, 52], [0, 1])
            lease_id = (await scheduler.lookup([51, 52])).lease_id
            await rank.step(loads=[rank.load_job(2, lease_id, [5, 6], skip_blocks=1)])
            assert await stream_refusal(rank.stream) is Code.INVALID_ARGUMENT
            await rank.handshake.closing()

    asyncio.run(scenario())


def test_bad_questions_of_a_scheduler(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(watched(daemon))
            place = Place("questions")
            rank = await stack.enter_async_context(Rank(daemon.socket_path, place))
            await rank.join()
            scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
            await scheduler.join()
            bad = {
                Code.INVALID_ARGUMENT: [
                    scheduler.lookup_request([1], hash_bytes=0),
                    scheduler.lookup_request([1], hash_bytes=33),
                    scheduler.lookup_request([1], hash_bytes=31),
                    scheduler.lookup_request([]),
                    scheduler.lookup_request(range(20_000)),
                    scheduler.lookup_request([1], group=4),
                ],
                Code.ABORTED: [
                    scheduler.lookup_request([1], generation=0),
                    scheduler.lookup_request([1], generation=99),
                ],
            }
            stream = scheduler.offload.Prefix(metadata=scheduler.metadata)
            number = 0
            for code, requests in bad.items():
                for request in requests:
                    number += 1
                    assert await refusal(scheduler.call("Lookup", request)) is code
                    await stream.write(pb.PrefixMessage(number=number, lookup=request))
                    reply = await stream.read()
                    assert (reply.number, reply.error.code) == (number, code.value[0])
                    assert reply.error.reason
            # Each of these was refused alone; the stream still works, until it breaks it.
            await stream.write(
                pb.PrefixMessage(number=99, release=pb.ReleaseRequest(lease_ids=[1]))
            )
            assert (await stream.read()).release.released == 0
            await stream.write(pb.PrefixMessage(number=100))
            assert await stream_refusal(stream) is Code.FAILED_PRECONDITION
            await scheduler.handshake.closing()

    asyncio.run(scenario())


def test_oversized_messages(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(watched(daemon))
            place = Place("oversized")
            rank = await stack.enter_async_context(Rank(daemon.socket_path, place))
            await rank.join()
            scheduler = await stack.enter_async_context(Scheduler(daemon.socket_path, place))
            await scheduler.join()
            huge = offload_pb2.LookupRequest(hashes=bytes(5 << 20), hash_bytes=32)
            assert await refusal(scheduler.call("Lookup", huge)) is Code.RESOURCE_EXHAUSTED
            await rank.send(step=pb.Step(revoked_job_ids=range(1 << 60, (1 << 60) + 600_000)))
            assert await stream_refusal(rank.stream) is Code.RESOURCE_EXHAUSTED
            # The stream is lost, the session is not.
            await rank.open_stream(epoch=2)
            assert (await rank.store(1, [61], [0])).job_id == 1

    asyncio.run(scenario())

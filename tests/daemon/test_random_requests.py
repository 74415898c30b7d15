"""Seeded random bytes and random messages into every RPC: a status and a sentence, no more."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvoffd_proto.v1 import admin_pb2
from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.bystander import watched
from tests.fakes.raw_client import Admin, Place, Rank, Scheduler, Session, block_hash

if TYPE_CHECKING:
    from tests.fakes.daemon_process import DaemonProcess

UNARY = {
    "/kvoffd.v1.Offload/Register": pb.RegisterRequest,
    "/kvoffd.v1.Offload/Heartbeat": pb.HeartbeatRequest,
    "/kvoffd.v1.Offload/Lookup": pb.LookupRequest,
    "/kvoffd.v1.Offload/Renew": pb.RenewRequest,
    "/kvoffd.v1.Offload/Release": pb.ReleaseRequest,
    "/kvoffd.v1.Offload/Reset": pb.ResetRequest,
    "/kvoffd.v1.Admin/Status": admin_pb2.StatusRequest,
    "/kvoffd.v1.Admin/Instances": admin_pb2.InstancesRequest,
    "/kvoffd.v1.Admin/Namespaces": admin_pb2.NamespacesRequest,
}
STREAMS = {
    "/kvoffd.v1.Offload/Transfer": pb.RankMessage,
    "/kvoffd.v1.Offload/Prefix": pb.PrefixMessage,
}
#: What a refusal may be; UNKNOWN and INTERNAL would be ours to explain.
FINE = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
}
INTEGERS = (0, 1, 2, 63, 64, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)


def random_message(dice: random.Random, message: Any, depth: int = 0) -> Any:
    """A message with some of its fields set to values that are likely to hurt."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.3:
            continue
        repeated = hasattr(getattr(message, field.name), "__len__") and not isinstance(
            getattr(message, field.name), str | bytes
        )
        for _ in range(dice.randrange(4) if repeated else 1):
            if field.message_type is not None:
                target = getattr(message, field.name)
                child = target.add() if repeated else target
                if not repeated:
                    child.SetInParent()
                random_message(dice, child, depth + 1)
                continue
            value = random_value(dice, field)
            if repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


def random_value(dice: random.Random, field: Any) -> Any:
    if field.type == field.TYPE_BYTES:
        return dice.choice([b"", b"x", block_hash(dice.randrange(4)), dice.randbytes(99)])
    if field.type == field.TYPE_STRING:
        return dice.choice(["", "cpu:0", "n", "€" * 40, "x" * 300])
    if field.type == field.TYPE_UINT64:
        return dice.choice([*INTEGERS, (1 << 64) - 1])
    return dice.choice(INTEGERS)


def random_payload(dice: random.Random, message_class: Any) -> bytes:
    """Random bytes, a random message, or one with a few bits turned."""
    if dice.random() < 0.25:
        return dice.randbytes(dice.randrange(1, 300))
    payload = bytearray(random_message(dice, message_class()).SerializeToString())
    if payload and dice.random() < 0.25:
        for _ in range(3):
            payload[dice.randrange(len(payload))] ^= 1 << dice.randrange(8)
    return bytes(payload)


async def call_unary(session: Session, path: str, payload: bytes) -> None:
    call = session.channel.unary_unary(path)(payload, metadata=session.metadata, timeout=30)
    code = await call.code()
    assert code in FINE, (code, await call.details())
    assert code is grpc.StatusCode.OK or await call.details()


async def call_stream(session: Session, path: str, payloads: list[bytes]) -> None:
    stream = session.channel.stream_stream(path)(metadata=session.metadata, timeout=30)
    # Its failure is looked at below.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for payload in payloads:
            await stream.write(payload)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass
    assert await stream.code() is grpc.StatusCode.OK or await stream.details()
    # What grpc's client says by itself when it wrote while the status was on its way.
    if await stream.details() != "Internal error from Core":
        assert await stream.code() in FINE, await stream.details()


async def joined(stack: AsyncExitStack, daemon: DaemonProcess, dice: random.Random) -> Session:
    """A session of a random role, most often a registered one."""
    place = Place(f"random-{dice.randrange(1 << 30)}", namespace={"model": "random"})
    session: Any = dice.choice([Rank, Scheduler, Admin])
    if session is Admin:
        admin = await stack.enter_async_context(Admin(daemon.socket_path))
        await admin.join()
        return admin
    made: Any = await stack.enter_async_context(session(daemon.socket_path, place))
    await made.join()
    if isinstance(made, Rank) and dice.random() < 0.8:
        await made.store(1, range(4), range(4))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(daemon: DaemonProcess, seed: int) -> None:
    dice = random.Random(seed)

    async def scenario() -> None:
        async with watched(daemon):
            for _ in range(12):
                async with AsyncExitStack() as stack:
                    session = await joined(stack, daemon, dice)
                    for _ in range(12):
                        if dice.random() < 0.6:
                            path = dice.choice(sorted(UNARY))
                            await call_unary(session, path, random_payload(dice, UNARY[path]))
                            continue
                        path = dice.choice(sorted(STREAMS))
                        payloads = [
                            random_payload(dice, STREAMS[path]) for _ in range(dice.randrange(5))
                        ]
                        if path.endswith("Transfer") and dice.random() < 0.7:
                            opening = pb.RankMessage(open=pb.StreamOpen(epoch=dice.randrange(99)))
                            payloads.insert(0, opening.SerializeToString())
                        await call_stream(session, path, payloads)

    asyncio.run(scenario())

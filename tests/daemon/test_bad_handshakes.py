"""Whatever comes over the handshake socket: a Closing with a sentence, and nothing else suffers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import socket
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvoffd_proto.v1 import handshake_pb2 as pb
from tests.fakes.bystander import watched
from tests.fakes.raw_client import Handshake, Place, Rank, Session
from tests.fakes.raw_memory import make_memfd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.daemon_process import DaemonProcess

RANK = pb.SESSION_ROLE_RANK


def bytes_of(**frame: Any) -> bytes:
    return pb.HandshakeRequest(**frame).SerializeToString()


FIRST_FRAMES: dict[str, tuple[bytes, int, int]] = {
    # The frame, descriptors beside it, and the code that must come.
    "garbage": (b"\xff\xfe garbage", 0, pb.CLOSE_CODE_PROTOCOL),
    "truncated": (
        bytes_of(hello=pb.Hello(client_version="x" * 99))[:50],
        0,
        pb.CLOSE_CODE_PROTOCOL,
    ),
    "no frame inside": (b"\x9a\x06\x00", 0, pb.CLOSE_CODE_PROTOCOL),
    "too long": (b"\0" * 70_000, 0, pb.CLOSE_CODE_PROTOCOL),
    "offer first": (bytes_of(offer=pb.Offer(size_bytes=1)), 1, pb.CLOSE_CODE_PROTOCOL),
    "goodbye first": (bytes_of(goodbye=pb.Goodbye()), 0, pb.CLOSE_CODE_PROTOCOL),
    "copier seen first": (bytes_of(copier_seen=pb.CopierSeen()), 0, pb.CLOSE_CODE_PROTOCOL),
    "too new": (
        bytes_of(hello=pb.Hello(protocol_min=7, protocol_max=9, role=RANK)),
        0,
        pb.CLOSE_CODE_VERSION,
    ),
    "no versions": (bytes_of(hello=pb.Hello(role=RANK)), 0, pb.CLOSE_CODE_VERSION),
    "no role": (
        bytes_of(hello=pb.Hello(protocol_min=1, protocol_max=1)),
        0,
        pb.CLOSE_CODE_PROTOCOL,
    ),
    "unknown role": (
        b"\x0a\x06\x08\x01\x10\x01\x28\x63",
        0,
        pb.CLOSE_CODE_PROTOCOL,
    ),
    "too many features": (
        bytes_of(hello=pb.Hello(protocol_min=1, protocol_max=1, role=RANK, features=["f"] * 1000)),
        0,
        pb.CLOSE_CODE_PROTOCOL,
    ),
    "two descriptors": (
        bytes_of(hello=pb.Hello(protocol_min=1, protocol_max=1, role=RANK)),
        2,
        pb.CLOSE_CODE_PROTOCOL,
    ),
    "a hundred descriptors": (
        bytes_of(hello=pb.Hello(protocol_min=1, protocol_max=1, role=RANK)),
        100,
        pb.CLOSE_CODE_PROTOCOL,
    ),
}


@pytest.mark.parametrize("name", FIRST_FRAMES)
def test_bad_first_frame(daemon: DaemonProcess, name: str) -> None:
    payload, descriptors, code = FIRST_FRAMES[name]

    async def scenario() -> None:
        async with watched(daemon):
            handshake = Handshake(daemon.socket_path)
            memfd = make_memfd(4096)
            try:
                handshake.send_bytes(payload, [memfd] * descriptors)
                closing = await handshake.closing()
                assert closing.code == code, closing
            finally:
                os.close(memfd)
                handshake.close()

    asyncio.run(scenario())


def unsealed(size_bytes: int) -> int:
    return make_memfd(size_bytes, seals=0)


def sealed_against_writing(size_bytes: int) -> int:
    return make_memfd(size_bytes, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)


def too_small(size_bytes: int) -> int:
    return make_memfd(size_bytes - 1)


def somebody_elses(size_bytes: int) -> int:
    fd = make_memfd(size_bytes)
    os.fchown(fd, 4242, -1)
    return fd


def read_only(size_bytes: int) -> int:
    fd = make_memfd(size_bytes)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def no_memfd(_: int) -> int:
    return os.open("/dev/zero", os.O_RDWR)


def a_file(size_bytes: int) -> int:
    fd = os.open("/var/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, size_bytes)
    return fd


def a_socket(_: int) -> int:
    with socket.socket() as made:
        return made.detach()


BAD_MEMORIES = [
    unsealed,
    sealed_against_writing,
    too_small,
    pytest.param(
        somebody_elses,
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away"),
    ),
    read_only,
    no_memfd,
    a_file,
    a_socket,
]


@pytest.mark.parametrize("make", BAD_MEMORIES)
def test_memory_that_cannot_be_used(daemon: DaemonProcess, make: Callable[[int], int]) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("bad-memory")) as rank:
            await rank.say_hello(RANK)
            fd = make(8192)
            try:
                await rank.offer(0, pb.MEMORY_KIND_POOL, 8192, fd)
                assert (await rank.handshake.closing()).code == pb.CLOSE_CODE_MEMORY
            finally:
                os.close(fd)

    asyncio.run(scenario())


OFFERS: dict[str, tuple[dict[str, int], int, int]] = {
    # Fields of the offer, descriptors beside it, and the code that must come.
    "no size": ({"kind": 1, "size_bytes": 0}, 1, pb.CLOSE_CODE_MEMORY),
    "huge": ({"kind": 1, "size_bytes": 1 << 60}, 1, pb.CLOSE_CODE_MEMORY),
    "no kind": ({"size_bytes": 4096}, 1, pb.CLOSE_CODE_PROTOCOL),
    "index too high": ({"memory_index": 10_000, "kind": 1, "size_bytes": 4096}, 1, 1),
    "no descriptor": ({"kind": 1, "size_bytes": 4096}, 0, pb.CLOSE_CODE_PROTOCOL),
    "three descriptors": ({"kind": 1, "size_bytes": 4096}, 3, pb.CLOSE_CODE_PROTOCOL),
    "five descriptors": ({"kind": 1, "size_bytes": 4096}, 5, pb.CLOSE_CODE_PROTOCOL),
}


@pytest.mark.parametrize("name", OFFERS)
def test_bad_offer(daemon: DaemonProcess, name: str) -> None:
    fields, descriptors, code = OFFERS[name]

    async def scenario() -> None:
        async with watched(daemon), Session(daemon.socket_path) as session:
            await session.say_hello(RANK)
            memfd = make_memfd(4096)
            try:
                session.handshake.send([memfd] * descriptors, offer=pb.Offer(**fields))
                assert (await session.handshake.closing()).code == code
            finally:
                os.close(memfd)

    asyncio.run(scenario())


def test_memory_offered_twice_and_too_late(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        async with watched(daemon), AsyncExitStack() as stack:
            twice = await stack.enter_async_context(Rank(daemon.socket_path, Place("twice")))
            await twice.say_hello(RANK)
            await twice.offer_all()
            await twice.offer(0, pb.MEMORY_KIND_POOL, 4096, twice.pool.fd)
            assert (await twice.handshake.closing()).code == pb.CLOSE_CODE_PROTOCOL
            late = await stack.enter_async_context(Rank(daemon.socket_path, Place("late")))
            await late.join()
            await late.offer(5, pb.MEMORY_KIND_POOL, 4096, late.pool.fd)
            assert (await late.handshake.closing()).code == pb.CLOSE_CODE_PROTOCOL

    asyncio.run(scenario())


@pytest.mark.parametrize("frame", ["hello", "garbage", "empty", "descriptor with goodbye"])
def test_bad_frame_of_a_session_that_works(daemon: DaemonProcess, frame: str) -> None:
    async def scenario() -> None:
        async with watched(daemon), Rank(daemon.socket_path, Place("works")) as rank:
            await rank.join()
            assert (await rank.store(1, [1], [0])).blocks_stored + rank.stores[
                1
            ].blocks_present == 1
            if frame == "hello":
                rank.handshake.hello(RANK)
            elif frame == "garbage":
                rank.handshake.send_bytes(random.Random(5).randbytes(500))
            elif frame == "empty":
                rank.handshake.send_bytes(b"")
            else:
                rank.handshake.send([rank.pool.fd], goodbye=pb.Goodbye())
            if frame == "empty":
                # It cannot be told from the connection's end.
                assert await rank.handshake.receive() == (None, [])
            else:
                assert (await rank.handshake.closing()).code == pb.CLOSE_CODE_PROTOCOL
            assert (await rank.receive()).closing.reason

    asyncio.run(scenario())


def test_silent_strangers_and_floods(own_daemon: DaemonProcess) -> None:
    """Connections that never say Hello are closed; those beyond the limit are told so."""
    own_daemon.set(hello_timeout_s=2, sessions_max=8)
    own_daemon.start()

    async def scenario() -> None:
        async with watched(own_daemon):
            silent = [Handshake(own_daemon.socket_path) for _ in range(30)]
            greedy: list[Handshake] = []
            try:
                for _ in range(12):
                    greedy.append(Handshake(own_daemon.socket_path))
                    greedy[-1].hello(RANK)
                replies = [(await handshake.receive())[0] for handshake in greedy]
                kinds = [reply and reply.WhichOneof("frame") for reply in replies]
                # Two sessions are the bystander's.
                assert kinds == ["welcome"] * 6 + ["closing"] * 6
                assert {reply.closing.code for reply in replies[6:] if reply} == {
                    pb.CLOSE_CODE_LIMIT
                }
                for handshake in silent:
                    assert (await handshake.closing()).code == pb.CLOSE_CODE_PROTOCOL
            finally:
                for handshake in silent + greedy:
                    handshake.close()

    asyncio.run(scenario())
    assert own_daemon.stop() == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_frames(daemon: DaemonProcess, seed: int) -> None:
    """Random bytes, mutated frames, random descriptors: the connection may end, nothing else."""
    dice = random.Random(seed)
    good = [
        bytes_of(hello=pb.Hello(protocol_min=1, protocol_max=1, role=RANK)),
        bytes_of(offer=pb.Offer(memory_index=1, kind=1, size_bytes=4096)),
        bytes_of(copier_seen=pb.CopierSeen(incarnation=5)),
        bytes_of(goodbye=pb.Goodbye(reason="x")),
    ]

    def frame() -> bytes:
        if dice.random() < 0.3:
            return dice.randbytes(dice.randrange(1, 200))
        payload = bytearray(dice.choice(good))
        if dice.random() < 0.5:
            payload[dice.randrange(len(payload))] = dice.randrange(256)
        return bytes(payload)

    async def scenario() -> None:
        async with watched(daemon):
            memfd = make_memfd(4096)
            try:
                for _ in range(40):
                    handshake = Handshake(daemon.socket_path)
                    # The daemon may have closed the connection by any of these.
                    with suppress(BrokenPipeError, ConnectionResetError):
                        if dice.random() < 0.7:
                            handshake.hello(RANK)
                        for _ in range(dice.randrange(1, 6)):
                            handshake.send_bytes(frame(), [memfd] * dice.randrange(3))
                    handshake.close()
            finally:
                os.close(memfd)

    asyncio.run(scenario())

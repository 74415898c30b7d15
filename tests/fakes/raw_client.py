"""A client written from the protocol alone, so that the daemon is tested without our client's help.

It does exactly what a test says, right or wrong: nothing is checked here, nothing is
repeated. Everything runs on the test's own asyncio loop.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc.aio

from kvoffd_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    handshake_pb2,
    offload_pb2,
    offload_pb2_grpc,
)
from tests.fakes.raw_memory import CELLS, Pool, Tickets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

WAIT_S = 30.0


def block_hash(number: int) -> bytes:
    return number.to_bytes(16, "little") * 2


class Handshake:
    """One connection of the handshake socket."""

    def __init__(self, socket_path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(f"{socket_path}.handshake")
        self.socket.settimeout(0)

    def close(self) -> None:
        self.socket.close()

    def send_bytes(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([payload], rights)

    def send(self, fds: Sequence[int] = (), **frame: Any) -> None:
        self.send_bytes(handshake_pb2.HandshakeRequest(**frame).SerializeToString(), fds)

    def hello(self, role: int, **fields: Any) -> None:
        fields = {"protocol_min": 1, "protocol_max": 1, "client_version": "raw"} | fields
        self.send(hello=handshake_pb2.Hello(role=role, **fields))

    async def receive(self) -> tuple[handshake_pb2.HandshakeReply | None, list[int]]:
        """One reply and its descriptors; None at the end of the connection."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    payload, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(16))
                except BlockingIOError:
                    await self._readable()
                    continue
                except ConnectionResetError:
                    return None, []
                fds = array.array("i")
                for _, _, content in ancillary:
                    fds.frombytes(content)
                if not payload:
                    return None, []
                return handshake_pb2.HandshakeReply.FromString(payload), fds.tolist()

    async def closing(self) -> handshake_pb2.Closing:
        """The Closing that must come now, with the connection's end behind it."""
        while True:
            reply, fds = await self.receive()
            for fd in fds:
                os.close(fd)
            assert reply is not None, "the connection ended without a Closing"
            if reply.WhichOneof("frame") == "closing":
                assert reply.closing.reason
                end, _ = await self.receive()
                assert end is None
                return reply.closing

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self.socket, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(self.socket)


class Session:
    """A session in any role: handshake, token, channel."""

    def __init__(self, socket_path: Path) -> None:
        self.handshake = Handshake(socket_path)
        self.welcome = handshake_pb2.Welcome()
        self.channel = grpc.aio.insecure_channel(f"unix:{socket_path}")
        self.offload = offload_pb2_grpc.OffloadStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self._undo = contextlib.ExitStack()
        self._undo.callback(self.handshake.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._undo.close()
        await self.channel.close()

    def keep(self, thing: Any) -> Any:
        """Close it together with the session."""
        self._undo.callback(thing.close)
        return thing

    async def say_hello(self, role: int) -> None:
        self.handshake.hello(role)
        reply, _ = await self.handshake.receive()
        assert reply is not None
        assert reply.WhichOneof("frame") == "welcome", reply
        self.welcome = reply.welcome

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [("kvoffd-session", self.welcome.session_token)]

    async def call(self, method: str, request: Any) -> Any:
        service = self.admin if hasattr(self.admin, method) else self.offload
        return await getattr(service, method)(request, metadata=self.metadata, timeout=WAIT_S)


@dataclass
class Place:
    """What a session says that it is a part of."""

    instance: str = "engine"
    nonce: str = "n"
    ranks_total: int = 1
    namespace: dict[str, str] = field(default_factory=lambda: {"model": "m"})

    def request(self, rank: offload_pb2.RankRegistration | None = None) -> Any:
        return offload_pb2.RegisterRequest(
            instance=offload_pb2.Instance(id=self.instance, nonce=self.nonce),
            namespace=offload_pb2.Namespace(
                fields=[
                    offload_pb2.NamespaceField(name=name, value=value)
                    for name, value in self.namespace.items()
                ]
            ),
            ranks_total=self.ranks_total,
            rank=rank,
        )


class Rank(Session):
    """A rank with a pool and a ticket page of its own."""

    def __init__(self, socket_path: Path, place: Place, rank: int = 0, **pool: int) -> None:
        super().__init__(socket_path)
        self.place = place
        self.rank = rank
        self.pool: Pool = self.keep(Pool(**pool))
        self.tickets: Tickets = self.keep(Tickets())
        self.incarnation = 0
        self.copier_pidfds: list[int] = []
        self.generation = 0
        self.stream: Any = None
        self.stores: dict[int, offload_pb2.StoreOutcome] = {}
        self.loads: dict[int, int] = {}

    async def __aexit__(self, *_: object) -> None:
        for pidfd in self.copier_pidfds:
            os.close(pidfd)
        await super().__aexit__()

    async def offer(self, memory_index: int, kind: int, size_bytes: int, fd: int) -> None:
        offer = handshake_pb2.Offer(memory_index=memory_index, kind=kind, size_bytes=size_bytes)
        self.handshake.send([fd], offer=offer)

    async def offer_all(self) -> None:
        for index, kind, memory in (
            (0, handshake_pb2.MEMORY_KIND_POOL, self.pool),
            (1, handshake_pb2.MEMORY_KIND_TICKETS, self.tickets),
        ):
            await self.offer(index, kind, memory.size_bytes, memory.fd)
            reply, _ = await self.handshake.receive()
            assert reply is not None
            assert reply.accepted.memory_index == index, reply

    def registration(self, **changes: Any) -> offload_pb2.RankRegistration:
        fields = {
            "rank": self.rank,
            "device": "cpu:0",
            "ticket_memory_index": 1,
            "ticket_cells": self.tickets.cells,
            "pool_blocks": self.pool.blocks,
            "regions": self.pool.regions(),
        }
        return offload_pb2.RankRegistration(**(fields | changes))

    async def register(self) -> None:
        answer = await self.call("Register", self.place.request(self.registration()))
        self.generation = answer.generation

    async def see_copier(self) -> None:
        """Take the CopierUp that must come, and confirm it."""
        reply, fds = await self.handshake.receive()
        assert reply is not None
        assert reply.WhichOneof("frame") == "copier_up", reply
        self.incarnation = reply.copier_up.incarnation
        self.copier_pidfds += fds
        seen = handshake_pb2.CopierSeen(incarnation=self.incarnation)
        self.handshake.send(copier_seen=seen)

    async def open_stream(self, epoch: int = 1) -> None:
        self.stream = self.offload.Transfer(metadata=self.metadata)
        await self.send(open=offload_pb2.StreamOpen(epoch=epoch))
        reply = await self.receive()
        assert reply.WhichOneof("message") == "opened", reply

    async def join(self) -> None:
        """All of the above, well-behaved."""
        await self.say_hello(handshake_pb2.SESSION_ROLE_RANK)
        await self.offer_all()
        await self.register()
        await self.see_copier()
        await self.open_stream()

    async def send(self, **message: Any) -> None:
        await self.stream.write(offload_pb2.RankMessage(**message))

    async def step(self, **fields: Any) -> None:
        await self.send(step=offload_pb2.Step(**fields))

    async def receive(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            return await self.stream.read()

    def store_job(
        self, job_id: int, numbers: Iterable[int], block_ids: Iterable[int], **changes: Any
    ) -> offload_pb2.StoreJob:
        """Issue a ticket; the cell is the job's id."""
        cell = job_id % CELLS
        self.tickets.issue(cell, job_id)
        fields = {
            "job_id": job_id,
            "generation": self.generation,
            "ticket_cell": cell,
            "blocks": [
                offload_pb2.BlockRef(hash=block_hash(number), block_id=block_id)
                for number, block_id in zip(numbers, block_ids, strict=True)
            ],
        }
        return offload_pb2.StoreJob(**(fields | changes))

    def load_job(
        self, job_id: int, lease_id: int, block_ids: Iterable[int], **changes: Any
    ) -> offload_pb2.LoadJob:
        cell = job_id % CELLS
        self.tickets.issue(cell, job_id)
        fields = {
            "job_id": job_id,
            "generation": self.generation,
            "ticket_cell": cell,
            "lease_id": lease_id,
            "block_ids": block_ids,
            "deadline_ms": int(WAIT_S * 1000),
        }
        return offload_pb2.LoadJob(**(fields | changes))

    async def outcome(self, job_id: int) -> Any:
        """A store's StoreOutcome or a load's LoadStatus; others are kept for later."""
        while job_id not in self.stores and job_id not in self.loads:
            reply = await self.receive()
            assert reply is not grpc.aio.EOF, "the stream has ended"
            assert reply.WhichOneof("message") == "completions", reply
            for store in reply.completions.stores:
                assert store.job_id not in self.stores, "one outcome a job"
                self.stores[store.job_id] = store
            for load in reply.completions.loads:
                assert load.job_id not in self.loads, "one outcome a job"
                self.loads[load.job_id] = load.status
        return self.stores.get(job_id) or self.loads[job_id]

    async def store(self, job_id: int, numbers: Sequence[int], block_ids: Sequence[int]) -> Any:
        """Fill the blocks, store them, wait."""
        for number, block_id in zip(numbers, block_ids, strict=True):
            self.pool.fill(block_id, number)
        await self.step(stores=[self.store_job(job_id, numbers, block_ids)])
        return await self.outcome(job_id)

    async def load(self, job_id: int, lease_id: int, block_ids: Sequence[int]) -> int:
        await self.step(loads=[self.load_job(job_id, lease_id, block_ids)])
        status: int = await self.outcome(job_id)
        return status


class Scheduler(Session):
    """A scheduler half."""

    def __init__(self, socket_path: Path, place: Place) -> None:
        super().__init__(socket_path)
        self.place = place
        self.generation = 0

    async def join(self) -> None:
        await self.say_hello(handshake_pb2.SESSION_ROLE_SCHEDULER)
        answer = await self.call("Register", self.place.request())
        self.generation = answer.generation

    def lookup_request(self, numbers: Iterable[int], **changes: Any) -> offload_pb2.LookupRequest:
        fields = {
            "generation": self.generation,
            "hashes": b"".join(block_hash(number) for number in numbers),
            "hash_bytes": 32,
        }
        return offload_pb2.LookupRequest(**(fields | changes))

    async def lookup(self, numbers: Iterable[int]) -> offload_pb2.LookupResponse:
        return await self.call("Lookup", self.lookup_request(numbers))


class Admin(Session):
    """An operator."""

    async def join(self) -> None:
        await self.say_hello(handshake_pb2.SESSION_ROLE_ADMIN)

    async def status(self) -> admin_pb2.StatusResponse:
        return await self.call("Status", admin_pb2.StatusRequest())

"""Clients that take all there is: descriptors, connections, buffers, namespaces.

They run into a limit and a sentence; a bystander is served all along, and what they took
comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.bystander import watched
from tests.fakes.raw_client import Handshake, Place, Rank, Scheduler

if TYPE_CHECKING:
    from tests.fakes.daemon_process import DaemonProcess

# A message of this protocol is a few hundred bytes: unread ones must not pile up by the thousand.
MESSAGES = 20_000
GROWTH_BYTES_MAX = 64 << 20


def resident_bytes(daemon: DaemonProcess) -> int:
    resident = int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[1])
    return resident * resource.getpagesize()


def used_cpu_s(daemon: DaemonProcess) -> float:
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_without_descriptors_it_waits_and_goes_on(own_daemon: DaemonProcess) -> None:
    """Handshakes beyond the process's limit wait in the backlog, and cost no turning in circles."""
    own_daemon.start()

    async def scenario() -> None:
        async with watched(own_daemon):
            _, hard = resource.prlimit(own_daemon.pid, resource.RLIMIT_NOFILE)
            few = len(own_daemon.descriptors()) + 12
            resource.prlimit(own_daemon.pid, resource.RLIMIT_NOFILE, (few, hard))
            handshakes = [Handshake(own_daemon.socket_path) for _ in range(60)]
            try:
                while True:
                    if len(own_daemon.descriptors()) >= few - 1:
                        break
                    await asyncio.sleep(0.01)
                before_s = used_cpu_s(own_daemon)
                await asyncio.sleep(1.0)
                # The bystander's own work is a few per cent of a core.
                assert used_cpu_s(own_daemon) - before_s < 0.7
            finally:
                for handshake in handshakes:
                    handshake.close()
                resource.prlimit(own_daemon.pid, resource.RLIMIT_NOFILE, (hard, hard))

    asyncio.run(scenario())
    assert own_daemon.stop() == 0


def test_connections_that_speak_no_grpc(daemon: DaemonProcess) -> None:
    """Half an opening, or garbage, on hundreds of connections that stay."""

    async def scenario() -> None:
        async with watched(daemon):
            with contextlib.ExitStack() as connections:
                for number in range(300):
                    connection = connections.enter_context(socket.socket(socket.AF_UNIX))
                    connection.connect(str(daemon.socket_path))
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        connection.send(b"PRI * HTTP/2.0\r\n" if number % 2 else os.urandom(100))
                async with Scheduler(daemon.socket_path, Place(instance="between")) as scheduler:
                    await scheduler.join()

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", ["Transfer", "Prefix"])
def test_a_stream_that_is_never_read_holds_a_bounded_amount(
    own_daemon: DaemonProcess, stream: str
) -> None:
    """The client writes on and on and never reads: its messages stop, the daemon does not."""
    own_daemon.start()

    async def never_read_stores() -> None:
        async with Rank(own_daemon.socket_path, Place(instance="deaf")) as rank:
            await rank.join()
            rank.pool.fill(1, 77)
            for number in range(1, MESSAGES):
                await rank.step(stores=[rank.store_job(number, [77], [1])])

    async def never_read_lookups() -> None:
        async with Scheduler(own_daemon.socket_path, Place(instance="deaf")) as scheduler:
            await scheduler.join()
            calls = scheduler.offload.Prefix(metadata=scheduler.metadata)
            for number in range(1, MESSAGES):
                lookup = scheduler.lookup_request([77])
                await calls.write(pb.PrefixMessage(number=number, lookup=lookup))

    async def scenario() -> None:
        async with watched(own_daemon):
            before = resident_bytes(own_daemon)
            writing = never_read_stores() if stream == "Transfer" else never_read_lookups()
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(10):
                    await writing
            assert resident_bytes(own_daemon) - before < GROWTH_BYTES_MAX

    asyncio.run(scenario())
    assert own_daemon.stop() == 0


def test_namespaces_beyond_the_limit_are_refused_and_the_known_ones_served(
    own_daemon: DaemonProcess,
) -> None:
    own_daemon.set(namespaces_max=8)
    own_daemon.start()

    async def scenario() -> None:
        async with watched(own_daemon):  # whose namespace is the first
            codes, sentences = [], []
            for number in [*range(1, 12), 1]:
                place = Place(instance=f"i{number}", namespace={"model": f"m{number}"})
                async with Scheduler(own_daemon.socket_path, place) as scheduler:
                    try:
                        await scheduler.join()
                        codes.append(grpc.StatusCode.OK)
                    except grpc.aio.AioRpcError as error:
                        codes.append(error.code())
                        sentences.append(error.details() or "")
            assert all("namespaces_max" in sentence for sentence in sentences)
            full = grpc.StatusCode.RESOURCE_EXHAUSTED
            assert codes == [grpc.StatusCode.OK] * 7 + [full] * 4 + [grpc.StatusCode.OK]

    asyncio.run(scenario())
    assert own_daemon.stop() == 0

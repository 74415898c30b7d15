"""The daemon's own life: start, stop, drain, stale files, who may connect, health."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvoffd_proto.v1 import admin_pb2, handshake_pb2
from kvoffd_proto.v1 import offload_pb2 as pb
from tests.fakes.raw_client import Admin, Handshake, Place, Rank, Scheduler

if TYPE_CHECKING:
    from tests.fakes.daemon_process import DaemonProcess

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def files_beside(daemon: DaemonProcess) -> set[str]:
    return {path.name for path in daemon.socket_path.parent.iterdir()}


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_start_and_stop_leave_nothing(own_daemon: DaemonProcess) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        own_daemon.start()
        copier = asyncio.run(own_daemon.status()).copiers[0].pid
        assert is_alive(copier)
        assert own_daemon.stop(number) == 0
        assert not is_alive(copier)
        assert files_beside(own_daemon) == {"k.sock.lock", "daemon.log"}


def test_files_of_a_dead_daemon_are_replaced(own_daemon: DaemonProcess) -> None:
    own_daemon.start()
    boot_id = asyncio.run(own_daemon.status()).boot_id
    own_daemon.stop(signal.SIGKILL)
    assert {"k.sock", "k.sock.handshake"} <= files_beside(own_daemon)
    own_daemon.start()
    assert asyncio.run(own_daemon.status()).boot_id != boot_id
    assert own_daemon.stop() == 0


def test_second_daemon_on_one_socket_is_refused(own_daemon: DaemonProcess) -> None:
    own_daemon.start()
    second = own_daemon.spawn()
    assert second.wait(60) == 1
    assert "Another daemon serves" in own_daemon.log
    asyncio.run(own_daemon.settled())
    assert own_daemon.stop() == 0


@pytest.mark.parametrize("name", ["k.sock", "k.sock.handshake"])
def test_file_that_is_no_socket_is_left_alone(own_daemon: DaemonProcess, name: str) -> None:
    path = own_daemon.socket_path.with_name(name)
    path.write_text("precious")
    assert own_daemon.spawn().wait(60) == 1
    assert "no socket" in own_daemon.log
    assert path.read_text() == "precious"


def test_drain_lets_running_jobs_end(own_daemon: DaemonProcess) -> None:
    own_daemon.start()

    async def scenario() -> None:
        place = Place("drained")
        async with (
            Rank(own_daemon.socket_path, place) as rank,
            Scheduler(own_daemon.socket_path, place) as scheduler,
            Admin(own_daemon.socket_path) as admin,
        ):
            await rank.join()
            await scheduler.join()
            await admin.join()
            health = health_pb2_grpc.HealthStub(admin.channel)
            await rank.store(1, [1], [0])
            lease_id = (await scheduler.lookup([1])).lease_id
            await rank.step(stores=[rank.store_job(2, [2], [1], bell=1)])
            await rank.step(loads=[rank.load_job(3, lease_id, [2], bell=1)])
            await own_daemon.eventually(lambda found: found.copiers[0].batches_in_flight == 2)
            os.kill(own_daemon.pid, signal.SIGTERM)
            async with asyncio.timeout(30):
                while True:
                    if (await admin.status()).draining:
                        break
                    await asyncio.sleep(0.01)
            late = await rank.store(4, [4], [4])
            assert [lost.reason for lost in late.unstored] == [pb.UNSTORED_REASON_DRAINING]
            assert await rank.load(5, lease_id, [5]) == pb.LOAD_STATUS_DRAINING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scheduler.lookup([1])
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            stranger = Handshake(own_daemon.socket_path)
            stranger.hello(handshake_pb2.SESSION_ROLE_RANK)
            assert (await stranger.closing()).code == handshake_pb2.CLOSE_CODE_DRAINING
            stranger.close()
            request = health_pb2.HealthCheckRequest(service="kvoffd.v1.Offload")
            assert (await health.Check(request)).status == NOT_SERVING
            rank.tickets.ring(1)
            assert (await rank.outcome(2)).blocks_stored == 1
            assert await rank.outcome(3) == pb.LOAD_STATUS_LOADED
            for session in (rank, scheduler, admin):
                closing = await session.handshake.closing()
                assert closing.code == handshake_pb2.CLOSE_CODE_DRAINING

    asyncio.run(scenario())
    # It is stopping by itself; another signal changes nothing.
    assert own_daemon.stop() == 0
    assert files_beside(own_daemon) == {"k.sock.lock", "daemon.log"}


def test_drain_gives_up_on_what_never_ends(own_daemon: DaemonProcess) -> None:
    own_daemon.set(drain_timeout_s=0.5)
    own_daemon.start()

    async def scenario() -> None:
        async with Rank(own_daemon.socket_path, Place("endless")) as rank:
            await rank.join()
            await rank.step(stores=[rank.store_job(1, [1], [0], bell=1)])
            await own_daemon.eventually(lambda found: found.copiers[0].batches_in_flight == 1)
            os.kill(own_daemon.pid, signal.SIGTERM)
            closing = await rank.handshake.closing()
            assert closing.code == handshake_pb2.CLOSE_CODE_DRAINING

    asyncio.run(scenario())
    assert own_daemon.stop() == 0
    assert "drain gives up" in own_daemon.log


def test_health_reflection_and_what_an_operator_sees(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        place = Place("seen", nonce="n1", namespace={"model": "seen", "dtype": "bf16"})
        async with Rank(daemon.socket_path, place) as rank, Admin(daemon.socket_path) as admin:
            await rank.join()
            await rank.store(1, [1, 2, 3], [0, 1, 2])
            await admin.join()
            health = health_pb2_grpc.HealthStub(admin.channel)
            for service in ("", "kvoffd.v1.Offload", "kvoffd.v1.Admin"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(admin.channel)
            listing = reflection.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            async for answer in listing:
                names = {service.name for service in answer.list_services_response.service}
                assert {"kvoffd.v1.Offload", "kvoffd.v1.Admin", "grpc.health.v1.Health"} <= names
            status = await admin.status()
            assert (status.sessions, status.instances) == (2, 1)
            assert status.arena.size_bytes == 64 << 20
            assert status.arena.extents_total == 16
            assert status.copiers[0].store_bytes >= 3 * 3 * 4096
            [instance] = (await admin.call("Instances", admin_pb2.InstancesRequest())).instances
            assert (instance.id, instance.nonce, instance.ranks_total) == ("seen", "n1", 1)
            assert list(instance.ranks_registered) == [0]
            assert list(instance.pids) == [os.getpid()]
            assert (instance.ledger.submitted, instance.ledger.stored) == (3, 3)
            answer = await admin.call("Namespaces", admin_pb2.NamespacesRequest())
            found = {
                tuple((field.name, field.value) for field in namespace.fields): namespace
                for namespace in answer.namespaces
            }[("dtype", "bf16"), ("model", "seen")]
            assert (found.blocks_ready, found.bytes_used) == (3, 3 * 3 * 4096)
            assert found.digest == instance.namespace_digest
        await daemon.settled()

    asyncio.run(scenario())


def test_order_of_namespace_fields_means_nothing(daemon: DaemonProcess) -> None:
    async def scenario() -> None:
        digests = set()
        for fields in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "12", "b": ""}):
            place = Place("order", nonce=str(fields), namespace=fields)
            async with Scheduler(daemon.socket_path, place) as scheduler:
                await scheduler.say_hello(handshake_pb2.SESSION_ROLE_SCHEDULER)
                answer = await scheduler.call("Register", place.request())
                digests.add(answer.namespace_digest)
        assert len(digests) == 2
        await daemon.settled()

    asyncio.run(scenario())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_other_users_are_refused_unless_allowed(own_daemon: DaemonProcess) -> None:
    own_daemon.set(socket_gid=4242, allowed_uids="4243")
    own_daemon.start()
    for name in ("k.sock", "k.sock.handshake"):
        found = own_daemon.socket_path.with_name(name).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, 4242)
    # The folders above are the test runner's own; their search bit is not what is tested.
    folders = [folder for folder in own_daemon.socket_path.parents if folder != Path("/")]
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in folders}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o001)
    try:
        for uid, expected in ((4242, "closing"), (4243, "welcome")):
            os.setegid(4242)
            os.seteuid(uid)
            try:
                handshake = Handshake(own_daemon.socket_path)
            finally:
                os.seteuid(0)
                os.setegid(0)
            handshake.hello(handshake_pb2.SESSION_ROLE_ADMIN)
            reply, _ = asyncio.run(handshake.receive())
            assert reply is not None
            assert reply.WhichOneof("frame") == expected
            if expected == "closing":
                assert reply.closing.code == handshake_pb2.CLOSE_CODE_FORBIDDEN
                assert "4242" in reply.closing.reason
            handshake.close()
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert own_daemon.stop() == 0


def test_sockets_are_private_by_default(daemon: DaemonProcess) -> None:
    for name in ("k.sock", "k.sock.handshake", "k.sock.lock"):
        assert stat.S_IMODE(daemon.socket_path.with_name(name).stat().st_mode) == 0o600


def test_log_is_structured_and_says_where_it_serves(daemon: DaemonProcess) -> None:
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    [serving] = [line for line in lines if line["event"] == "serving"]
    assert serving["socket"] == str(daemon.socket_path)
    assert serving["arena_bytes"] == 64 << 20

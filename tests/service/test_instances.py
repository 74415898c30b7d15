"""Sessions and instances: who gets which place, and what goes with whom."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from kvoffd.errors import (
    BadRequest,
    CopyFailed,
    Draining,
    Forbidden,
    InstanceConflict,
    InstanceNotFound,
    NamespaceNotFound,
    Overloaded,
    ProtocolMismatch,
    SessionNotFound,
    StaleGeneration,
)
from kvoffd.service.sessions import CloseCode, Memory, MemoryKind, Role
from tests.fakes.service_world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ANOTHER_PID = 1


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_roles_register_as_what_they_are() -> None:
    async def scenario() -> None:
        async with World() as world:
            for role, rank, error in (
                (Role.ADMIN, None, Forbidden),
                (Role.ADMIN, 0, Forbidden),
                (Role.SCHEDULER, 0, ProtocolMismatch),
                (Role.RANK, None, ProtocolMismatch),
            ):
                session = world.session(role)
                with pytest.raises(error):
                    await world.instances.register(session, world.registration("engine", rank))
                with pytest.raises(InstanceNotFound):
                    world.instances.instance(session)
            assert len(world.instances) == 0

    run(scenario)


def test_limits() -> None:
    async def scenario() -> None:
        async with World(sessions_max=4, instances_max=2, namespaces_max=2) as world:
            first, second, third = (world.session(Role.SCHEDULER) for _ in range(3))
            register = world.instances.register
            await register(first, world.registration("one", namespace="a"))
            await register(second, world.registration("two", namespace="b"))
            with pytest.raises(Overloaded, match="namespaces"):
                await register(third, world.registration("three", namespace="c"))
            with pytest.raises(Overloaded, match="instances"):
                await register(third, world.registration("three", namespace="b"))
            world.sessions.close(first, None, "goodbye")
            await register(third, world.registration("three", namespace="b"))
            world.session(Role.ADMIN)
            world.session(Role.ADMIN)
            with pytest.raises(Overloaded, match="sessions"):
                world.session(Role.ADMIN)
            world.sessions.draining = True
            with pytest.raises(Draining):
                world.session(Role.ADMIN)

    run(scenario)


def test_token_is_good_until_the_end() -> None:
    async def scenario() -> None:
        async with World() as world:
            session, other = world.session(Role.ADMIN), world.session(Role.ADMIN)
            assert world.sessions.get(session.token) is session
            assert session.token != other.token
            assert len(session.token) == 32
            world.sessions.close(session, CloseCode.PROTOCOL, "why")
            world.sessions.close(session, CloseCode.DEAD, "again")
            assert session.link.closed == (CloseCode.PROTOCOL, "why")
            with pytest.raises(SessionNotFound):
                world.sessions.get(session.token)
            assert len(world.sessions) == 1

    run(scenario)


def test_memory_comes_before_registration_once_and_within_the_limit() -> None:
    async def scenario() -> None:
        async with World(memories_max=3) as world:
            session = world.session(Role.RANK)
            world.offer(session)
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            for index in (0, 3):
                with pytest.raises(ProtocolMismatch):
                    world.sessions.add_memory(session, Memory(index, MemoryKind.POOL, 1, fd))
            await world.instances.register(session, world.registration("engine", 0))
            with pytest.raises(ProtocolMismatch):
                world.sessions.add_memory(session, Memory(2, MemoryKind.POOL, 1, fd))
            os.close(fd)

    run(scenario)


def test_place_of_a_live_process_is_not_given_away() -> None:
    async def scenario() -> None:
        async with World() as world:
            session = world.session(Role.RANK, pid=ANOTHER_PID)
            world.offer(session)
            registration = world.registration("engine", 0)
            await world.instances.register(session, registration)
            scheduler = world.session(Role.SCHEDULER, pid=ANOTHER_PID)
            await world.instances.register(scheduler, world.registration("engine"))
            thief = world.session(Role.RANK)
            world.offer(thief)
            with pytest.raises(InstanceConflict, match=str(ANOTHER_PID)):
                await world.instances.register(thief, registration)
            with pytest.raises(InstanceConflict):
                await world.scheduler("engine")
            assert not session.closed
            # It may try again, and its memory is still its own.
            world.sessions.close(session, CloseCode.DEAD, "killed")
            await world.instances.register(thief, registration)
            assert thief.seat is not None
            assert len(world.copier.pools) == 1

    run(scenario)


def test_two_processes_that_the_kernel_does_not_name_are_two() -> None:
    async def scenario() -> None:
        async with World() as world:
            first, second = (world.session(Role.SCHEDULER, pid=0) for _ in range(2))
            await world.instances.register(first, world.registration("engine"))
            with pytest.raises(InstanceConflict):
                await world.instances.register(second, world.registration("engine"))

    run(scenario)


def test_pool_that_cannot_be_opened_leaves_the_place_free() -> None:
    async def scenario() -> None:
        async with World() as world:
            session = world.session(Role.RANK)
            world.offer(session)
            registration = world.registration("engine", 0)
            world.copier.refusal = CopyFailed("The test refuses.")
            with pytest.raises(CopyFailed):
                await world.instances.register(session, registration)
            assert len(world.instances) == 0
            with pytest.raises(InstanceNotFound):
                world.instances.seat(session)
            world.copier.refusal = None
            await world.instances.register(session, registration)
            assert world.instances.instance(session).is_complete

    run(scenario)


def test_session_that_ends_while_its_pool_is_opened() -> None:
    async def scenario() -> None:
        async with World() as world:
            opening = asyncio.Event()
            open_pool = world.copier.open_pool

            async def slow_open_pool(*arguments: object) -> int:
                await opening.wait()
                pool_id: int = await open_pool(*arguments)
                return pool_id

            world.copier.open_pool = slow_open_pool
            session = world.session(Role.RANK)
            world.offer(session)
            registering = asyncio.ensure_future(
                world.instances.register(session, world.registration("engine", 0))
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(ProtocolMismatch):
                await world.instances.register(session, world.registration("engine", 0))
            world.sessions.close(session, CloseCode.DEAD, "killed")
            assert session.memories
            opening.set()
            with pytest.raises(SessionNotFound):
                await registering
            await world.instances.wait_closed()
            assert not session.memories
            assert not world.copier.pools
            assert len(world.instances) == 0

    run(scenario)


def test_caller_that_gives_up_on_its_registration_has_registered() -> None:
    async def scenario() -> None:
        async with World() as world:
            session = world.session(Role.RANK)
            world.offer(session)
            registering = asyncio.ensure_future(
                world.instances.register(session, world.registration("engine", 0))
            )
            await asyncio.sleep(0)
            registering.cancel()
            await world.instances.wait_closed()
            assert world.instances.seat(session).pool_id is not None

    run(scenario)


def test_shards_of_a_namespace_have_one_size() -> None:
    async def scenario() -> None:
        async with World() as world:
            await world.member("engine")
            session = world.session(Role.RANK)
            world.offer(session)
            registration = world.registration("other", 0)
            assert registration.rank is not None
            halved = registration.rank._replace(pool_blocks=8)
            regions = (halved.regions[0], halved.regions[0])
            with pytest.raises(BadRequest, match="was registered with"):
                await world.instances.register(
                    session, registration._replace(rank=halved._replace(regions=regions))
                )
            assert len(world.instances) == 1

    run(scenario)


def test_lookups_before_the_first_rank_miss_and_resets_count() -> None:
    async def scenario() -> None:
        async with World() as world:
            scheduler = await world.scheduler("engine")
            assert world.lookup(scheduler, [1]).hit_blocks == 0
            assert world.lookups.reset(scheduler).generation == 2
            with pytest.raises(StaleGeneration):
                world.lookup(scheduler, [1], generation=1)
            digest = world.instances.instance(scheduler).digest
            with pytest.raises(NamespaceNotFound):
                world.namespaces.require(digest)
            await world.member("engine")
            assert world.namespaces.generation(digest) == 2
            assert [entry.generation for entry in world.arena.read_namespaces()] == [2]

    run(scenario)


def test_copiers_are_announced_to_those_whom_they_serve() -> None:
    async def scenario() -> None:
        async with World() as world:
            member = await world.member("engine")
            scheduler = await world.scheduler("engine")
            world.copier.restart()
            assert member.session.link.copiers == [1, 2]
            assert scheduler.link.copiers == []

    run(scenario)

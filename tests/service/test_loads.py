"""Loads through the services: when they may start, how they end, what they keep alive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvoffd.copier.frames import Outcome
from kvoffd.errors import BadRequest, JobConflict
from kvoffd.service.sessions import CloseCode
from kvoffd.service.streams import LoadStatus
from tests.fakes.service_world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvoffd.service.sessions import Session
    from tests.fakes.service_world import Member


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def stored(world: World) -> tuple[Member, Session]:
    """An engine with blocks 1 to 3 stored."""
    member = await world.member("engine")
    scheduler = await world.scheduler("engine")
    member.store(1, [1, 2, 3])
    world.copier.end_all()
    await member.collect()
    return member, scheduler


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.COPIED, LoadStatus.LOADED),
        (Outcome.REVOKED, LoadStatus.REVOKED),
        (Outcome.CANCELLED, LoadStatus.REVOKED),
        (Outcome.DEADLINE, LoadStatus.DEADLINE),
        (Outcome.FAILED, LoadStatus.COPIER),
    ],
)
def test_each_end_has_its_status(outcome: Outcome, status: LoadStatus) -> None:
    async def scenario() -> None:
        async with World() as world:
            member, scheduler = await stored(world)
            lease_id = world.lookup(scheduler, [1, 2, 3]).lease_id
            member.load(2, lease_id, 3)
            assert world.cache.statistics().holds == 6
            world.copier.end_all(outcome)
            await member.collect()
            assert member.loads == {2: status}
            # The only rank has ended its load: the lease is spent.
            assert world.cache.statistics().holds == 0
            world.assert_quiet()

    run(scenario)


def test_load_outlives_its_lease_and_dies_with_the_generation() -> None:
    async def scenario() -> None:
        async with World(lease_ttl_s=1.0) as world:
            member, scheduler = await stored(world)
            member.load(2, world.lookup(scheduler, [1, 2]).lease_id, 2)
            world.turn(2.0)
            assert world.cache.statistics().leases == 0
            assert world.cache.statistics().holds == 2
            assert world.lookups.reset(scheduler).generation == 2
            world.copier.end_all()
            await member.collect()
            assert member.loads == {2: LoadStatus.STALE_GENERATION}
            world.assert_quiet()
            assert world.arena.read_table() == ()
            assert [entry.generation for entry in world.arena.read_namespaces()] == [2]

    run(scenario)


def test_load_waits_for_the_copier_that_its_client_has_confirmed() -> None:
    async def scenario() -> None:
        async with World() as world:
            member, scheduler = await stored(world)
            world.copier.restart()
            assert member.session.link.copiers == [1, 2]
            first, second = (world.lookup(scheduler, [1]).lease_id for _ in range(2))
            member.load(2, first, 1, deadline_s=1.0)
            member.load(3, second, 1, deadline_s=9.0)
            assert not world.copier.batches
            world.loads.copier_seen(member.session, 1)
            assert not world.copier.batches
            world.turn(2.0)
            await member.collect()
            assert member.loads == {2: LoadStatus.DEADLINE}
            world.loads.copier_seen(member.session, 2)
            assert len(world.copier.batches) == 1
            # Said once more it starts nothing once more.
            world.loads.copier_seen(member.session, 2)
            world.copier.end_all()
            await member.collect()
            assert member.loads[3] is LoadStatus.LOADED
            world.assert_quiet()

    run(scenario)


def test_copier_is_killed_for_an_overdue_load_alone() -> None:
    async def scenario() -> None:
        async with World(overdue_kill_s=2.0, lease_ttl_s=60.0) as world:
            member, scheduler = await stored(world)
            member.load(2, world.lookup(scheduler, [1]).lease_id, 1, deadline_s=1.0)
            world.turn(2.9)
            assert world.copier.killed == []
            world.turn(0.2)
            world.turn(0.2)
            assert len(world.copier.killed) == 1
            world.copier.restart()
            await member.collect()
            assert member.loads == {2: LoadStatus.COPIER}
            world.assert_quiet()

    run(scenario)


def test_refusals() -> None:
    async def scenario() -> None:
        async with World(jobs_in_flight_max=1) as world:
            member, scheduler = await stored(world)
            lease_id = world.lookup(scheduler, [1, 2]).lease_id
            member.load(2, 999, 1)
            member.load(3, lease_id, 1, generation=7)
            with pytest.raises(BadRequest):
                member.load(4, lease_id, 3)
            with pytest.raises(BadRequest):
                member.load(4, lease_id, 2, skip_blocks=1)
            member.load(5, lease_id, 1, skip_blocks=1)
            with pytest.raises(JobConflict):
                member.load(5, lease_id, 1)
            member.load(6, lease_id, 1)
            world.copier.end_all()
            await member.collect()
            member.load(7, lease_id, 1)
            world.transfers.draining = True
            member.load(8, lease_id, 1)
            await member.collect()
            assert member.loads == {
                2: LoadStatus.LEASE_NOT_FOUND,
                3: LoadStatus.STALE_GENERATION,
                5: LoadStatus.LOADED,
                6: LoadStatus.OVERLOADED,
                7: LoadStatus.LEASE_NOT_FOUND,
                8: LoadStatus.DRAINING,
            }
            world.assert_quiet()

    run(scenario)


def test_lost_stream_and_lost_rank_stop_what_has_not_begun() -> None:
    async def scenario() -> None:
        async with World() as world:
            member, scheduler = await stored(world)
            leases = [world.lookup(scheduler, [1]).lease_id for _ in range(3)]
            member.load(2, leases[0], 1)
            [running] = world.copier.batches
            world.copier.restart()
            member.load(3, leases[1], 1)
            world.transfers.lose_stream(member.seat, member.stream, "gone")
            assert running not in world.copier.batches
            assert world.loads.loads_open == 0
            member.open_stream(2)
            world.loads.copier_seen(member.session, 2)
            member.load(4, leases[2], 1)
            world.sessions.close(member.session, CloseCode.DEAD, "killed")
            [running] = world.copier.batches
            assert world.copier.cancelled == {running}
            await world.instances.wait_closed()
            assert world.loads.loads_open == 0
            world.assert_quiet()

    run(scenario)

"""Stores through the services: the order of what is written, and who hears what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvoffd.arena.format import SlotState
from kvoffd.copier.frames import Outcome
from kvoffd.core.types import UnstoredReason
from kvoffd.errors import BadRequest, JobConflict, ProtocolMismatch
from kvoffd.service.sessions import CloseCode
from tests.fakes.service_world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.fakes.service_world import Member


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def states(world: World) -> list[SlotState]:
    return [found.state for found in world.arena.read_table()]


async def pair(world: World, name: str = "engine") -> tuple[Member, Member]:
    return await world.member(name, 0, 2), await world.member(name, 1, 2)


def test_records_are_written_before_the_copy_and_ready_after_the_last() -> None:
    async def scenario() -> None:
        async with World() as world:
            first, second = await pair(world)
            scheduler = await world.scheduler("engine", 2)
            first.store(1, [1, 2])
            assert states(world) == [SlotState.WRITING] * 2
            world.copier.end_all()
            assert world.lookup(scheduler, [1]).hit_blocks == 0
            second.store(1, [1, 2])
            assert states(world) == [SlotState.WRITING] * 4
            assert first.stores == {}
            world.copier.end_all()
            assert states(world) == [SlotState.READY] * 4
            for member in (first, second):
                await member.collect()
                assert member.stores[1].stored == 2
            assert world.lookup(scheduler, [1, 2]).hit_blocks == 2
            world.assert_quiet()

    run(scenario)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.REVOKED, UnstoredReason.REVOKED),
        (Outcome.CANCELLED, UnstoredReason.REVOKED),
        (Outcome.FAILED, UnstoredReason.COPIER),
    ],
)
def test_bad_end_of_one_rank_fails_the_job_for_all(
    outcome: Outcome, reason: UnstoredReason
) -> None:
    async def scenario() -> None:
        async with World() as world:
            first, second = await pair(world)
            first.store(1, [1, 2])
            second.store(1, [1, 2])
            batch_of_first, batch_of_second = world.copier.batches
            world.copier.end(batch_of_first, outcome)
            # The other copy runs on: its slots are nobody else's until it has ended.
            assert world.copier.cancelled == {batch_of_second}
            assert len(states(world)) == 2
            assert world.cache.statistics().slots_quarantined == 2
            world.copier.end(batch_of_second)
            assert states(world) == []
            for member in (first, second):
                await member.collect()
                assert member.stores[1].unstored == ((reason, 2),)
            world.assert_quiet()

    run(scenario)


def test_job_that_its_other_rank_never_begins_ends_by_its_deadline() -> None:
    async def scenario() -> None:
        async with World(store_deadline_s=3.0) as world:
            first, _ = await pair(world)
            first.store(1, [1])
            world.copier.end_all()
            world.turn(3.5)
            await first.collect()
            assert first.stores[1].unstored == ((UnstoredReason.DEADLINE, 1),)
            # The slot of the rank that never came was never written, and is free all the same.
            assert states(world) == []
            world.assert_quiet()

    run(scenario)


def test_rank_dies_with_a_copy_running() -> None:
    async def scenario() -> None:
        async with World() as world:
            first, second = await pair(world)
            for member in (first, second):
                member.store(1, [1])
            world.sessions.close(second.session, CloseCode.DEAD, "killed")
            await first.collect()
            assert first.stores[1].unstored == ((UnstoredReason.RANK_LOST, 1),)
            assert second.session.memories, "its memory is needed until its pool is closed"
            await world.instances.wait_closed()
            assert not second.session.memories
            world.copier.end_all()
            world.assert_quiet()

    run(scenario)


def test_waiter_takes_over_and_a_dead_one_does_not() -> None:
    async def scenario() -> None:
        async with World() as world:
            writer = await world.member("writer")
            heir = await world.member("heir")
            lost = await world.member("lost stream")
            writer.store(1, [1])
            lost.store(1, [1])
            heir.store(1, [1])
            [batch] = world.copier.batches
            world.transfers.lose_stream(lost.seat, lost.stream, "gone")
            writer.revoke(1)
            await writer.collect()
            assert writer.stores[1].unstored == ((UnstoredReason.REVOKED, 1),)
            # The one whose stream is gone would be next; nothing is copied for it.
            [following] = set(world.copier.batches) - {batch}
            assert world.copier.batches[following].pool_id == heir.seat.pool_id
            world.copier.end(following)
            await heir.collect()
            assert heir.stores[1].stored == 1
            world.copier.end_all()
            world.assert_quiet()

    run(scenario)


def test_job_taken_back_before_anybody_began_it() -> None:
    async def scenario() -> None:
        async with World() as world:
            first, second = await pair(world)
            first.revoke(1)
            second.store(1, [1, 2])
            await second.collect()
            assert second.stores[1].unstored == ((UnstoredReason.REVOKED, 2),)
            world.copier.end_all()
            world.assert_quiet()

    run(scenario)


def test_what_is_refused_is_counted_for_all_ranks_alike() -> None:
    async def scenario() -> None:
        async with World(jobs_in_flight_max=2) as world:
            alone = await world.member("engine", 0, 2)
            alone.store(1, [1])
            await alone.collect()
            assert alone.stores[1].unstored == ((UnstoredReason.NOT_COMPLETE, 1),)
            other = await world.member("engine", 1, 2)
            other.store(1, [1])
            await other.collect()
            assert other.stores[1].unstored == ((UnstoredReason.NOT_COMPLETE, 1),)
            for job_id in (2, 3, 4):
                alone.store(job_id, [job_id])
            world.transfers.draining = True
            other.store(5, [5])
            await alone.collect()
            await other.collect()
            assert alone.stores[4].unstored == ((UnstoredReason.OVERLOADED, 1),)
            assert other.stores[5].unstored == ((UnstoredReason.DRAINING, 1),)
            # What the first rank has begun goes on, whatever has happened since.
            other.store(2, [2])
            assert 2 not in other.stores
            world.turn(60)
            world.copier.end_all()
            world.assert_quiet()

    run(scenario)


def test_refused_jobs_leave_no_trace() -> None:
    async def scenario() -> None:
        async with World() as world:
            member = await world.member("engine")
            with pytest.raises(BadRequest):
                member.store(1, [1], group=5)
            with pytest.raises(BadRequest):
                member.store(1, [1, 1])
            assert member.seat.jobs == {}
            assert member.seat.instance.unsettled == set()
            member.store(1, [1])
            with pytest.raises(JobConflict):
                member.store(1, [1])
            assert list(member.seat.jobs) == [1]
            world.copier.end_all()
            await member.collect()
            assert member.stores[1].stored == 1
            world.assert_quiet()

    run(scenario)


def test_streams_are_replaced_in_order() -> None:
    async def scenario() -> None:
        async with World() as world:
            member = await world.member("engine")
            first = member.stream
            member.store(1, [1])
            [batch] = world.copier.batches
            member.open_stream(7)
            assert world.copier.cancelled == {batch}
            assert await first.take() is None
            with pytest.raises(ProtocolMismatch):
                world.transfers.open_stream(member.seat, 7)
            world.copier.end_all()
            # The old stream's end comes late: it must not touch the new one.
            member.store(2, [2])
            world.transfers.lose_stream(member.seat, first, "late")
            world.copier.end_all()
            await member.collect()
            assert member.stores[2].stored == 1
            member.stream.say_goodbye()
            with pytest.raises(ProtocolMismatch):
                member.store(3, [3])
            world.assert_quiet()

    run(scenario)


def test_client_that_does_not_read_its_outcomes_is_stopped() -> None:
    async def scenario() -> None:
        async with World(jobs_in_flight_max=2) as world:
            member = await world.member("engine")
            for job_id in range(1, 10):
                member.store(job_id, [job_id], generation=0)
            with pytest.raises(ProtocolMismatch, match="read"):
                member.store(10, [10])
            await member.collect()
            member.store(11, [11])
            world.copier.end_all()
            world.assert_quiet()

    run(scenario)


def test_instance_that_comes_back_under_its_name_shares_nothing() -> None:
    async def scenario() -> None:
        async with World() as world:
            member = await world.member("engine")
            member.store(1, [1])
            [batch] = world.copier.batches
            world.sessions.close(member.session, CloseCode.DEAD, "killed")
            again = await world.member("engine")
            again.store(1, [1, 2])
            assert batch not in world.copier.batches
            world.copier.end_all()
            await again.collect()
            assert again.stores[1].stored == 2
            world.assert_quiet()
            ledger = world.cache.ledger_total()
            assert dict(ledger.unstored) == {UnstoredReason.RANK_LOST: 1}

    run(scenario)

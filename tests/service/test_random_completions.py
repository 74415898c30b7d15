"""Seeded disorder: copies end in any order and any way, ranks and streams come and go.

Whatever happens, each job gets exactly one outcome unless its stream is gone, the counts of
an outcome are those of its job, the core's invariants hold after each turn, and in the end
nothing is open and every block is accounted for.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from kvoffd.copier.frames import Outcome
from kvoffd.service.sessions import CloseCode
from tests.fakes.service_world import World

if TYPE_CHECKING:
    from kvoffd.service.sessions import Session
    from tests.fakes.service_world import Member

OUTCOMES = [Outcome.COPIED] * 6 + list(Outcome)
TURNS = 250


class Engine:
    """One instance whose ranks get the same jobs, each at its own time."""

    def __init__(self, world: World, dice: random.Random, name: str, ranks_total: int) -> None:
        self.world = world
        self.dice = dice
        self.name = name
        self.ranks_total = ranks_total
        self.members: dict[int, Member] = {}
        self.scheduler: Session | None = None
        self.job_ids = 0
        self.jobs: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.todo: list[tuple[int, int]] = []
        self.leases: list[tuple[int, int]] = []
        #: Jobs handed over by a stream that is still there: (rank, job) -> blocks, None a load.
        self.owed: dict[tuple[int, int], int | None] = {}
        self.epochs = 1
        self.settled = 0

    @property
    def generation(self) -> int:
        assert self.scheduler is not None
        digest = self.world.instances.instance(self.scheduler).digest
        return self.world.namespaces.generation(digest)

    async def act(self) -> None:
        """Make up the missing, do one thing, hear what there is to hear."""
        if self.scheduler is None:
            self.scheduler = await self.world.scheduler(self.name, self.ranks_total)
        for rank in range(self.ranks_total):
            if rank not in self.members:
                self.members[rank] = await self.world.member(self.name, rank, self.ranks_total)
        acts = [self.decide, self.hand_over, self.look_up, self.load, self.revoke]
        rare = [self.reopen, self.die, self.reset]
        act = self.dice.choices(acts + rare, [35, 35, 10, 10, 4, 2, 1.5, 0.5])[0]
        act(self.dice.randrange(self.ranks_total))
        await self.collect()

    def decide(self, _: int) -> None:
        self.job_ids += 1
        start = self.dice.randrange(40)
        self.jobs[self.job_ids] = list(range(start, start + self.dice.randrange(1, 6)))
        self.todo += [(self.job_ids, rank) for rank in range(self.ranks_total)]

    def revoke(self, rank: int) -> None:
        if self.jobs:
            self.members[rank].revoke(self.dice.choice(sorted(self.jobs)))

    def reopen(self, rank: int) -> None:
        self.forget(rank)
        self.epochs += 1
        self.members[rank].open_stream(self.epochs)

    def die(self, rank: int) -> None:
        self.forget(rank)
        session = self.members.pop(rank).session
        self.world.sessions.close(session, CloseCode.DEAD, "the dice")

    def reset(self, _: int) -> None:
        assert self.scheduler is not None
        self.world.lookups.reset(self.scheduler)

    def hand_over(self, _: int) -> None:
        if not self.todo:
            return
        job_id, rank = self.todo.pop(self.dice.randrange(len(self.todo)))
        numbers = self.jobs[job_id]
        self.owed[rank, job_id] = len(numbers)
        # All ranks of a job say the same; now and then it is stale.
        stale = self.generation - (self.dice.random() < 0.05)
        generation = self.generations.setdefault(job_id, stale)
        self.members[rank].store(job_id, numbers, generation=generation)

    def look_up(self, _: int) -> None:
        assert self.scheduler is not None
        numbers = range(self.dice.randrange(40), 46)
        found = self.world.lookup(self.scheduler, numbers, self.generation)
        if found.lease_id is not None:
            self.leases.append((found.lease_id, found.hit_blocks))

    def load(self, rank: int) -> None:
        if not self.leases:
            return
        assert self.scheduler is not None
        lease_id, blocks = self.dice.choice(self.leases)
        if self.dice.random() < 0.2:
            self.world.lookups.release(self.scheduler, [lease_id])
        self.job_ids += 1
        self.owed[rank, self.job_ids] = None
        self.members[rank].load(self.job_ids, lease_id, blocks, generation=self.generation)

    def forget(self, rank: int) -> None:
        for key in [key for key in self.owed if key[0] == rank]:
            del self.owed[key]
        self.members[rank].stores.clear()
        self.members[rank].loads.clear()

    async def collect(self) -> None:
        for rank, member in self.members.items():
            await member.collect()
            for job_id, outcome in member.stores.items():
                blocks = self.owed.pop((rank, job_id), 0)
                unstored = sum(count for _, count in outcome.unstored)
                assert outcome.stored + outcome.present + unstored == len(self.jobs[job_id])
                self.settled += bool(blocks)
            for job_id in member.loads:
                assert self.owed.pop((rank, job_id)) is None
                self.settled += 1
            member.stores.clear()
            member.loads.clear()


@pytest.mark.parametrize("seed", range(12))
def test_disorder(seed: int) -> None:
    dice = random.Random(seed)

    async def scenario() -> None:
        async with World(lease_ttl_s=3.0, store_deadline_s=10.0) as world:
            engines = [Engine(world, dice, f"engine {n}", n % 2 + 1) for n in range(3)]
            for _ in range(TURNS):
                engine = dice.choice(engines)
                await engine.act()
                batches = sorted(world.copier.batches)
                for batch_id in dice.sample(batches, dice.randrange(len(batches) + 1)):
                    if dice.random() < 0.5 and batch_id in world.copier.batches:
                        world.copier.end(batch_id, dice.choice(OUTCOMES))
                if dice.random() < 0.01:
                    world.copier.restart()
                    for engine in engines:
                        for member in engine.members.values():
                            world.loads.copier_seen(member.session, world.copier.incarnation)
                world.turn(dice.random() * 0.3)
            world.copier.end_all()
            world.turn(100.0)
            world.copier.end_all()
            for engine in engines:
                await engine.collect()
                assert engine.owed == {}, engine.owed
            assert sum(engine.settled for engine in engines) > TURNS // 10
            world.turn()
            world.assert_quiet()
            assert world.cache.statistics().holds == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))

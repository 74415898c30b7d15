"""One instance of the product's client inside an engine process: sessions, halves, memory.

Owns all of it, from the first handshake to the last goodbye. Engine thread.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from kvoffd_client.descriptions import (
    EngineIdentity,
    RankDescription,
    RegionDescription,
    SessionOptions,
)
from kvoffd_client.engine.rank import RankHalf
from kvoffd_client.engine.scheduler import SchedulerHalf
from kvoffd_client.engine.types import RankOptions, SchedulerOptions
from kvoffd_client.memory import SharedMemory
from kvoffd_client.ports import SessionState
from kvoffd_client.rank_session import RankSession
from kvoffd_client.scheduler_session import SchedulerSession
from kvoffd_client.tickets import TicketPage
from tests.engine.daemon import wait_a_little
from tests.engine.pool import Pool, regions_of

if TYPE_CHECKING:
    from tests.engine.defects import Defect
    from tests.engine.workload import Plan

UP_DEADLINE_S = 30.0
TICKET_CELLS = 512
# The machine is shared with other tests; a lookup that misses its time proves nothing.
LOOKUP_DEADLINE_S = 0.25
# Long enough for a stopped process to come back, short enough to see what comes after.
LOAD_DEADLINE_S = 1.5


class OpenInstance:
    """An instance that has registered with the daemon, all ranks of it."""

    def __init__(
        self, plan: Plan, socket_path: str, defect: Defect, *, patient: bool = False
    ) -> None:
        self.identity = (f"engine-{plan.engine}", f"{plan.seed}-{uuid.uuid4().hex}")
        # Without a fault no session may be lost, or the accounts cannot be compared exactly: a
        # starved machine is not to be taken for a dead daemon.
        self._options = SessionOptions(socket_path=socket_path, heartbeat_timeout_s=60.0)
        # After an outage the tests are not to wait long for the next try.
        if patient:
            self._options = SessionOptions(
                socket_path=socket_path, heartbeat_timeout_s=1.0, backoff_max_s=0.3
            )
        self._engine = EngineIdentity(
            instance_id=self.identity[0],
            nonce=self.identity[1],
            namespace=(
                ("salt", plan.salt),
                ("arrangement", plan.shape.arrangement),
                ("layers", str(plan.shape.layers)),
                ("token_bytes", str(plan.shape.token_bytes)),
            ),
            ranks_total=plan.ranks,
        )
        self._memories: list[SharedMemory] = []
        self._tickets: list[TicketPage] = []
        self._sessions: list[SchedulerSession | RankSession] = []
        self.pools: list[Pool] = []
        self._scheduler_half = SchedulerHalf(
            self._scheduler_session(),
            plan.shape.block_tokens,
            SchedulerOptions(
                ranks_total=plan.ranks,
                strict=True,
                lookup_deadline_s=LOOKUP_DEADLINE_S,
                resend_pause_s=0.1,
            ),
            time.monotonic,
        )
        self._rank_halves = [self._rank_half(plan, rank) for rank in range(plan.ranks)]
        self.scheduler_half: Any = defect.scheduler(self._scheduler_half)
        self.rank_halves: list[Any] = [defect.rank(half) for half in self._rank_halves]
        self._wait_until_complete()

    def jobs_in_flight(self) -> int:
        """Blocks and loads without an end, on either side."""
        scheduler = self._scheduler_half.statistics()
        ranks = [half.statistics() for half in self._rank_halves]
        return (
            scheduler.ledger.in_flight
            + scheduler.loads_outstanding
            + sum(rank.ledger.in_flight + rank.loads_outstanding for rank in ranks)
        )

    def ledger(self) -> dict[str, Any]:
        """The ranks' accounts added up: what the daemon counts, blocks times ranks."""
        total: dict[str, Any] = {
            "submitted": 0,
            "stored": 0,
            "present": 0,
            "in_flight": 0,
            "rejected": {},
            "failed": {},
        }
        for half in self._rank_halves:
            ledger = half.statistics().ledger
            for name in ("submitted", "stored", "present", "in_flight"):
                total[name] += getattr(ledger, name)
            for name in ("rejected", "failed"):
                for reason, blocks in getattr(ledger, name).items():
                    total[name][str(reason)] = total[name].get(str(reason), 0) + blocks
        return total

    def statistics(self) -> dict[str, Any]:
        """What the halves say of themselves, for a report."""
        return {
            "scheduler": repr(self._scheduler_half.statistics()),
            "ranks": [repr(half.statistics()) for half in self._rank_halves],
            "sessions": [repr(session.status) for session in self._sessions],
        }

    def close(self) -> None:
        """Halves first, as at an engine's end, then sessions, then the memory."""
        for half in self._rank_halves:
            half.shutdown()
        for session in self._sessions:
            session.close()
        for pool in self.pools:
            pool.close()
        for tickets in self._tickets:
            tickets.close()
        for memory in self._memories:
            memory.close()

    def _scheduler_session(self) -> SchedulerSession:
        session = SchedulerSession(self._options, self._engine)
        self._sessions.append(session)
        session.start()
        return session

    def _rank_half(self, plan: Plan, rank: int) -> RankHalf:
        regions, sizes = regions_of(plan.shape)
        memories = [SharedMemory.create(f"test-pool-{rank}", size) for size in sizes]
        self._memories += memories
        self.pools.append(
            Pool(plan.shape, rank, [memoryview(memory.buffer) for memory in memories])
        )
        tickets = TicketPage.create(TICKET_CELLS)
        self._tickets.append(tickets)
        description = RankDescription(
            rank=rank,
            device="cpu:0",
            pool_blocks=plan.shape.blocks,
            memories=tuple(memories),
            regions=tuple(
                RegionDescription(
                    group=0,
                    memory_index=region.memory,
                    offset_bytes=region.offset_bytes,
                    block_stride_bytes=region.block_stride_bytes,
                    block_bytes=region.block_bytes,
                )
                for region in regions
            ),
        )
        session = RankSession(self._options, self._engine, description, tickets)
        self._sessions.append(session)
        session.start()
        return RankHalf(
            session,
            tickets,
            RankOptions(rank=rank, strict=True, load_deadline_s=LOAD_DEADLINE_S),
            time.monotonic,
        )

    def _wait_until_complete(self) -> None:
        for session in self._sessions:
            up = session.wait_until(SessionState.UP, UP_DEADLINE_S)
            assert up, f"no session: {session.status}"
        ends_s = time.monotonic() + UP_DEADLINE_S
        while not self._sessions[0].instance_complete:
            assert time.monotonic() < ends_s, "the instance is not complete"
            wait_a_little()

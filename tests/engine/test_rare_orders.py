"""What an engine does seldom, said to the halves alone: no daemon, no threads, no time.

Each case was once a way to wrong bytes, to a request that never ends, or to a burst that
starves loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvoffd_client.engine.metadata import LoadOrder, StepMetadata, StoreOrder
from kvoffd_client.engine.rank import RankHalf
from kvoffd_client.engine.scheduler import SchedulerHalf
from kvoffd_client.engine.types import (
    RankOptions,
    RequestProgress,
    RequestView,
    SchedulerOptions,
    StepView,
)
from kvoffd_client.ports import (
    LOADS_PART,
    NO_COMPLETIONS,
    Completions,
    Limits,
    LookupResult,
    PendingLookup,
    PendingRenewal,
    Reason,
    ReasonCount,
    SessionState,
    Step,
    StoreResult,
)
from kvoffd_client.tickets import TicketPage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 32
CELLS = 64


class MissingEverything:
    """A scheduler's session whose every lookup is a miss, answered at once."""

    state = SessionState.UP
    accepting = True
    instance_complete = True
    generation = 1
    limits = Limits(512, 512, 512, 4096, 1.0, 30.0, 8)

    def start_lookup(self, generation: int, group: int, hashes: Sequence[bytes]) -> PendingLookup:
        del generation, group, hashes
        pending = PendingLookup(lambda _: None)
        pending.result = LookupResult()
        return pending

    def renew(self, lease_id: int) -> PendingRenewal:
        del lease_id
        return PendingRenewal()

    def release(self, lease_ids: Sequence[int]) -> None:
        del lease_ids

    def reset(self, timeout_s: float) -> bool:
        del timeout_s
        self.generation += 1
        return True


class Silent:
    """A rank's session that takes everything and says nothing of its own."""

    state = SessionState.UP
    limits = None

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def hand_over(self, step: Step) -> None:
        self.steps.append(step)

    def drain(self) -> Completions:
        return NO_COMPLETIONS

    def copier_gone(self, ticket_cell: int, incarnation: int) -> bool:
        del ticket_cell, incarnation
        return False

    def close(self, timeout_s: float = 1.0) -> None:
        del timeout_s


class Clock:
    """Time that stands still until told otherwise."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(clock: Clock) -> SchedulerHalf:
    return SchedulerHalf(MissingEverything(), BLOCK_TOKENS, SchedulerOptions(1, strict=True), clock)


@pytest.fixture
def tickets() -> Iterator[TicketPage]:
    found = TicketPage.create(CELLS)
    yield found
    found.close()


@pytest.fixture
def rank(tickets: TicketPage, clock: Clock) -> RankHalf:
    return RankHalf(Silent(), tickets, RankOptions(0), clock)


def hashes_of(name: int, blocks: int) -> list[bytes]:
    return [bytes([name, at]) * 16 for at in range(blocks)]


def progress(
    name: str, blocks: Sequence[int], tokens: int, hashes: Sequence[bytes], *, resumed: bool = False
) -> RequestProgress:
    return RequestProgress(name, blocks, tokens, resumed, hashes)


def store_one(half: SchedulerHalf, name: str, blocks: list[int], hashes: list[bytes]) -> StoreOrder:
    """A request computes all its blocks but the last, and its store goes out."""
    tokens = (len(blocks) - 1) * BLOCK_TOKENS + 1
    view = RequestView(name, hashes, tokens)
    while half.lookup(view, 0) is None:
        pass
    half.allocated(name, blocks, 0)
    (order,) = half.build_step(StepView([progress(name, blocks, tokens, hashes)])).stores
    half.finished(name, tokens, tokens + 1, hashes, blocks)
    return order


def test_blocks_given_at_a_readmission_that_was_never_looked_up_are_fenced(
    scheduler: SchedulerHalf,
) -> None:
    """Preempted between two steps, as a reset of running requests does, with no lookup at all."""
    scheduler.allocated("no lookup", [1, 2, 3], 0)
    scheduler.build_step(StepView([progress("no lookup", [1, 2, 3], 96, ())]))
    order = store_one(scheduler, "stored", [7, 8, 9, 10], hashes_of(5, 3))
    scheduler.allocated("no lookup", [7, 8, 9], 0)
    step = scheduler.build_step(
        StepView([progress("no lookup", [7, 8, 9], 96, (), resumed=True)], {"no lookup"})
    )
    assert step.fences == (order.job_id,)


def test_a_request_given_its_own_blocks_back_fences_nothing(scheduler: SchedulerHalf) -> None:
    """Allocation is told twice where a load came between; the blocks are the same."""
    hashes = hashes_of(6, 3)
    while scheduler.lookup(RequestView("r", hashes, 97), 0) is None:
        pass
    scheduler.allocated("r", [1, 2, 3, 4], 0)
    scheduler.build_step(StepView([progress("r", [1, 2, 3, 4], 97, hashes)]))
    scheduler.allocated("r", [1, 2, 3, 4, 5], 0)
    step = scheduler.build_step(StepView([progress("r", [5], 140, hashes)]))
    assert step.fences == ()


def test_tokens_that_no_step_computed_are_not_stored(scheduler: SchedulerHalf) -> None:
    """Another connector's load counts as computed before its bytes come; then it is aborted."""
    hashes = hashes_of(1, 4)
    while scheduler.lookup(RequestView("r", hashes, 130), 0) is None:
        pass
    scheduler.allocated("r", [7, 8, 9, 10], 0)
    assert scheduler.build_step(StepView()).stores == ()
    scheduler.finished("r", 128, 130, hashes, [7, 8, 9, 10])
    assert scheduler.build_step(StepView()).stores == ()


def test_what_a_request_alive_at_a_reset_computes_is_nobodys_fresh_block(
    scheduler: SchedulerHalf,
) -> None:
    """A later request that finds such blocks in the engine's own cache does not store them."""
    hashes = hashes_of(2, 3)
    while scheduler.lookup(RequestView("old", hashes, 97), 0) is None:
        pass
    scheduler.allocated("old", [1], 0)
    scheduler.build_step(StepView([progress("old", [1], 32, hashes[:1])]))
    assert scheduler.reset()
    # Computed after the reset, from what was there before it.
    scheduler.build_step(StepView([progress("old", [2], 64, hashes[:2])]))
    while scheduler.lookup(RequestView("new", hashes, 97), 64) is None:
        pass
    scheduler.allocated("new", [1, 2, 3], 0)
    step = scheduler.build_step(StepView([progress("new", [1, 2, 3], 96, hashes)]))
    assert step.stores == ()


def test_after_an_outage_stores_are_sent_again_a_few_at_a_step(
    scheduler: SchedulerHalf, clock: Clock
) -> None:
    """None is forgotten, none comes twice, and no step carries all of them."""
    kept: set[bytes] = set()
    for number in range(200):
        hashes = [bytes([number, 1]) * 16]
        blocks = [2 * number, 2 * number + 1]
        order = store_one(scheduler, f"r{number}", blocks, hashes)
        lost = (ReasonCount(Reason.CONNECTION_LOST, 1),)
        result = StoreResult(order.job_id, failed=lost, from_daemon=False)
        assert scheduler._book.settle(0, result, clock())
        kept.update(order.block_hashes)
    assert scheduler.statistics().kept_blocks == len(kept)
    assert not scheduler.has_pending_push()
    clock.now_s = 60.0
    assert scheduler.has_pending_push()
    counts = []
    again: list[bytes] = []
    while scheduler.has_pending_push():
        orders = scheduler.build_step(StepView()).stores
        counts.append(len(orders))
        again += [block for order in orders for block in order.block_hashes]
    assert (sorted(again), max(counts)) == (sorted(kept), 64)
    assert scheduler.statistics().kept_blocks == 0


def a_step_of_stores(count: int) -> StepMetadata:
    orders = (StoreOrder(at, 1, 0, b"", (b"h%d" % at,), (at,)) for at in range(1, count + 1))
    return StepMetadata(1, tuple(orders))


def run(half: RankHalf, metadata: StepMetadata) -> tuple[frozenset[str], frozenset[int]]:
    half.handle_fences(metadata)
    half.start_loads(metadata)
    finished = half.finish_step(metadata)
    half.end_step()
    return finished.request_ids, finished.failed_block_ids


def test_stores_leave_tickets_for_loads(rank: RankHalf, tickets: TicketPage) -> None:
    """However many stores there are, a load finds a ticket."""
    run(rank, a_step_of_stores(CELLS))
    assert tickets.cells_free == CELLS // LOADS_PART
    load = StepMetadata(2, loads=(LoadOrder(100, "r", 1, 5, 0, (70, 71)),))
    assert run(rank, load) == (frozenset(), frozenset())
    assert rank.statistics().loads_outstanding == 1


def test_a_fault_in_the_fences_revokes_all_that_is_out(rank: RankHalf, tickets: TicketPage) -> None:
    """Nobody watches those blocks any more."""
    run(rank, a_step_of_stores(2))
    unhashable = [1]
    rank.handle_fences(StepMetadata(2, fences=(unhashable, 1, 2)))  # type: ignore[arg-type]  # the fault
    assert rank.statistics().is_off
    assert [tickets.is_revoked(cell) for cell in (0, 1)] == [True, True]


@pytest.mark.parametrize("at", range(3))
def test_a_fault_in_handing_a_load_over_still_ends_every_load(
    rank: RankHalf, tickets: TicketPage, at: int
) -> None:
    """The faulty one, those before it and those after it; each exactly once."""

    class Fault(TicketPage):
        def allocate(self, job_id: int) -> int | None:
            if job_id == 100 + at:
                raise RuntimeError("a fault of ours")
            return TicketPage.allocate(self, job_id)

    tickets.__class__ = Fault
    loads = tuple(LoadOrder(100 + n, f"r{n}", 1, 5, 0, (70 + n,)) for n in range(3))
    ended: list[str] = []
    failed: set[int] = set()
    for metadata in (StepMetadata(1, loads=loads), StepMetadata(2), StepMetadata(3)):
        requests, blocks = run(rank, metadata)
        ended += requests
        failed |= blocks
    tickets.__class__ = TicketPage
    assert rank.statistics().is_off
    assert (sorted(ended), failed) == (["r0", "r1", "r2"], {70, 71, 72})

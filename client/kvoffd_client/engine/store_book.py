"""Stores under way, by the engine's block: who owns a pool block's bytes until when.

Owned by the scheduler half, on the scheduler's thread. A *run* is a piece of
one prefix. It waits (decided, in no metadata yet), is out (in a step's
metadata, under a job id) or is kept (the daemon did not acknowledge it; it is
sent again while its blocks are nobody else's). A pool block is in one run at
most. The book decides nothing about what is worth storing.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffd_client.engine.metadata import StoreOrder
from kvoffd_client.ledger import Ledger
from kvoffd_client.ports import Reason, StoreResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvoffd_client.engine.types import SchedulerOptions

REUSED = "reused"
FORWARD_RAISED = "forward_raised"
NO_TICKET = "no_ticket"
# Curable by waiting: the daemon or a rank's way to it was not there, or had no room to work.
_WAIT_REASONS: frozenset[str] = frozenset(
    {
        Reason.NOT_CONNECTED,
        Reason.CONNECTION_LOST,
        Reason.RANK_LOST,
        Reason.COPIER,
        Reason.DRAINING,
        Reason.NOT_COMPLETE,
        Reason.OVERLOADED,
        NO_TICKET,
    }
)
# A run that cannot be stored in this many tries will not be in more: half an hour of outage.
_TRIES_MAX = 64
# Each fence names another block of the run; a run torn so often is not worth the messages.
_FENCED_TRIES_MAX = 4
# Runs sent again in one step. After an outage there may be tens of thousands: all at once they
# would hold the engine up for a second, and find no place in the daemon.
_RESENT_RUNS_MAX = 64


@dataclass(slots=True, eq=False)
class _Run:
    parent_hash: bytes
    block_hashes: Sequence[bytes]
    block_ids: Sequence[int]
    generation: int
    tries: int = 0
    job_id: int | None = None
    ranks_waiting: set[int] | None = None
    worst: StoreResult | None = None
    #: Of all ranks: one rank's reason to try again is none where another has a reason not to.
    reasons: set[str] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    is_fenced: bool = False


class StoreBook:
    """Runs by block and by job, and the ledger of jobs."""

    def __init__(self, options: SchedulerOptions, next_job_id: Callable[[], int]) -> None:
        self._options = options
        self._next_job_id = next_job_id
        #: The run of a block, and the block's place in it.
        self._run_of_block: dict[int, tuple[_Run, int]] = {}
        self._out: dict[int, _Run] = {}
        self._waiting: deque[_Run] = deque()
        #: By age, oldest first; and by the time at which each is due, dropped ones among them.
        self._kept: dict[int, _Run] = {}
        self._due: list[tuple[float, int]] = []
        self._kept_total = 0
        self._fences: list[int] = []
        self.kept_blocks = 0
        self.kept_blocks_dropped = 0
        self.ledger = Ledger()

    # --- What is decided ---------------------------------------------------------------

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash under which this block is being stored; None when it is in no run."""
        found = self._run_of_block.get(block_id)
        return None if found is None else found[0].block_hashes[found[1]]

    def add(
        self,
        parent_hash: bytes,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        generation: int,
    ) -> None:
        """Decide a run. None of its blocks may be in another."""
        run = _Run(parent_hash, tuple(block_hashes), tuple(block_ids), generation)
        self._enter(run)
        self._waiting.append(run)

    def reuse(self, block_ids: Iterable[int]) -> None:
        """Blocks belong to somebody else from this step on: fence, shorten or forget their runs."""
        runs = self._run_of_block
        if not runs:
            return
        for block_id in block_ids:
            found = runs.pop(block_id, None)
            if found is None:
                continue
            run = found[0]
            run.lost.add(block_id)
            if run.job_id is not None and not run.is_fenced:
                run.is_fenced = True
                self._fences.append(run.job_id)

    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def has_due(self, now_s: float) -> bool:
        """Whether a kept run should be sent again by now."""
        due = self._due
        while due and due[0][1] not in self._kept:
            heapq.heappop(due)
        return bool(due) and due[0][0] <= now_s

    # --- What goes into a step's metadata --------------------------------------------------

    def take_fences(self) -> tuple[int, ...]:
        if not self._fences:
            return ()
        fences, self._fences = tuple(self._fences), []
        return fences

    def emit(
        self, store_blocks_max: int, now_s: float, resend_generation: int | None
    ) -> tuple[StoreOrder, ...]:
        """Orders for this step. Kept runs go only when `resend_generation` is given, and is theirs.

        A run that lost blocks goes out in pieces; the lost ones are rejected as reused.
        """
        if not self._waiting and not self._kept:
            return ()
        orders: list[StoreOrder] = []
        while self._waiting:
            self._emit_run(self._waiting.popleft(), store_blocks_max, orders)
        if resend_generation is not None:
            runs = 0
            while runs < _RESENT_RUNS_MAX and self.has_due(now_s):
                run = self._kept.pop(heapq.heappop(self._due)[1])
                self.kept_blocks -= len(run.block_ids)
                if run.generation == resend_generation:
                    self._emit_run(run, store_blocks_max, orders)
                else:
                    self._forget(run)
                runs += 1
        return tuple(orders)

    def _emit_run(self, run: _Run, store_blocks_max: int, orders: list[StoreOrder]) -> None:
        if run.lost and run.tries == 0:
            # Decided, but never handed over: nobody else will account for these.
            job_id = self._next_job_id()
            self.ledger.submit(job_id, len(run.lost))
            self.ledger.reject(job_id, REUSED)
        for begin, end in _pieces(run, store_blocks_max):
            piece = _Run(
                run.block_hashes[begin - 1] if begin else run.parent_hash,
                run.block_hashes[begin:end],
                run.block_ids[begin:end],
                run.generation,
                run.tries,
                job_id=self._next_job_id(),
                ranks_waiting=set(range(self._options.ranks_total)),
            )
            assert piece.job_id is not None
            self._enter(piece)
            self._out[piece.job_id] = piece
            self.ledger.submit(piece.job_id, len(piece.block_ids))
            orders.append(
                StoreOrder(
                    piece.job_id,
                    piece.generation,
                    self._options.group,
                    piece.parent_hash,
                    tuple(piece.block_hashes),
                    tuple(piece.block_ids),
                )
            )

    # --- What comes back -------------------------------------------------------------------

    def settle(self, rank: int, result: StoreResult, now_s: float) -> bool:
        """One rank's end of a job; the job ends with the last rank's. False: no such job is open.

        Ranks may disagree, when one of them lost its connection: the worst of them counts.
        """
        run = self._out.get(result.job_id)
        if run is None or run.ranks_waiting is None or rank not in run.ranks_waiting:
            return False
        run.ranks_waiting.remove(rank)
        run.reasons.update(entry.reason for entry in (*result.rejected, *result.failed))
        if run.worst is None or _good(result) < _good(run.worst):
            run.worst = result
        if run.ranks_waiting:
            return True
        del self._out[result.job_id]
        self._forget(run)
        self.ledger.settle(run.worst)
        if _good(run.worst) < len(run.block_ids):
            self._keep(run, now_s)
        return True

    def _keep(self, run: _Run, now_s: float) -> None:
        """Keep what was not stored, if trying again may help and no fence named it."""
        torn = run.is_fenced and run.reasons == {Reason.REVOKED}
        if torn:
            if run.tries >= _FENCED_TRIES_MAX:
                return
            pause_s = 0.0
        elif run.reasons <= _WAIT_REASONS and run.tries < _TRIES_MAX:
            pause_s = min(
                self._options.resend_pause_s * 2 ** min(run.tries, 16),
                self._options.resend_pause_max_s,
            )
        else:
            return
        for begin, end in _pieces(run, len(run.block_ids)):
            again = _Run(
                run.block_hashes[begin - 1] if begin else run.parent_hash,
                run.block_hashes[begin:end],
                run.block_ids[begin:end],
                run.generation,
                run.tries + 1,
            )
            # Meanwhile the same block may have been decided anew, under the same hash.
            if any(block_id in self._run_of_block for block_id in again.block_ids):
                continue
            self._enter(again)
            self._kept_total += 1
            self._kept[self._kept_total] = again
            heapq.heappush(self._due, (now_s + pause_s, self._kept_total))
            self.kept_blocks += end - begin
        while self.kept_blocks > self._options.kept_blocks_max:
            self._drop_oldest()

    def reset(self, reason: str) -> None:
        """Nothing decided so far may be stored; what is out is rejected by its generation."""
        while self._waiting:
            run = self._waiting.popleft()
            self._forget(run)
            job_id = self._next_job_id()
            self.ledger.submit(job_id, len(run.block_ids))
            self.ledger.reject(job_id, reason)
        while self._kept:
            self._drop_oldest()
        self._due.clear()

    def fence_all(self) -> None:
        """Fence every job that is out: nobody will watch its blocks any more."""
        for job_id, run in self._out.items():
            if not run.is_fenced:
                run.is_fenced = True
                self._fences.append(job_id)

    def _drop_oldest(self) -> None:
        run = self._kept.pop(next(iter(self._kept)))
        self.kept_blocks -= len(run.block_ids)
        self.kept_blocks_dropped += len(run.block_ids) - len(run.lost)
        self._forget(run)

    def _enter(self, run: _Run) -> None:
        for at, block_id in enumerate(run.block_ids):
            self._run_of_block[block_id] = (run, at)

    def _forget(self, run: _Run) -> None:
        for block_id in run.block_ids:
            found = self._run_of_block.get(block_id)
            if found is not None and found[0] is run:
                del self._run_of_block[block_id]


def _pieces(run: _Run, blocks_max: int) -> list[tuple[int, int]]:
    """Index ranges of the blocks that the run still has, none longer than `blocks_max`."""
    if not run.lost:
        total = len(run.block_ids)
        return [(at, min(at + blocks_max, total)) for at in range(0, total, blocks_max)]
    pieces: list[tuple[int, int]] = []
    begin: int | None = None
    for at, block_id in enumerate(run.block_ids):
        if block_id in run.lost:
            if begin is not None:
                pieces.append((begin, at))
            begin = None
            continue
        if begin is None:
            begin = at
        elif at - begin == blocks_max:
            pieces.append((begin, at))
            begin = at
    if begin is not None:
        pieces.append((begin, len(run.block_ids)))
    return pieces


def _good(result: StoreResult) -> int:
    return result.stored + result.present

"""The scheduler half: which blocks to store, look up, load and fence, decided step by step.

Owns the state of living requests and of jobs. All methods belong to the
engine's scheduler thread; none waits, but `reset`. None raises in production: a
fault of ours turns the half off, and the engine goes on without offload.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvoffd_client.engine.fresh_blocks import FreshBlocks
from kvoffd_client.engine.guard import Guard
from kvoffd_client.engine.holdings import Holdings
from kvoffd_client.engine.load_book import LoadBook
from kvoffd_client.engine.lookups import Lookups
from kvoffd_client.engine.metadata import LoadEnd, RankReport, StepMetadata, StoreOrder
from kvoffd_client.engine.store_book import StoreBook
from kvoffd_client.engine.types import (
    RequestView,
    SchedulerOptions,
    SchedulerStatistics,
    StepView,
)
from kvoffd_client.ports import Reason, SchedulerPort

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvoffd_client.engine.requests import RequestState


class SchedulerHalf:
    """One engine's scheduler half. Call order a step: lookup*, allocated*, build_step."""

    def __init__(
        self,
        session: SchedulerPort,
        block_tokens: int,
        options: SchedulerOptions,
        clock: Callable[[], float],
    ) -> None:
        assert block_tokens > 0, "a block has tokens"
        self._port = session
        self._block_tokens = block_tokens
        self._options = options
        self._clock = clock
        self._guard = Guard("scheduler half", strict=options.strict)
        self._lookups = Lookups(session, block_tokens, options, clock)
        self._book = StoreBook(options, self._next_job_id)
        self._fresh = FreshBlocks(self._book, self._guard)
        self._holdings = Holdings(self._book, self._fresh, self._guard)
        self._requests = self._holdings.requests
        self._loads = LoadBook(options.ranks_total, self._next_job_id)
        self._jobs = 0
        self._step = 1
        self._generation: int | None = None
        self._resets = 0
        self._skipped: Counter[str] = Counter()

    # --- Hooks -------------------------------------------------------------------------

    def lookup(self, request: RequestView, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: ask again next step.

        `computed_tokens` are those that the engine has for this request by itself,
        so the request has no blocks now. Asking again changes nothing.
        """
        if self._guard.is_off:
            return 0
        try:
            return self._lookup(request, computed_tokens)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._guard.turn_off("lookup")
            return 0

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine gave a request blocks: all it has now. With external tokens, load them."""
        try:
            self._allocated(request_id, block_ids, external_tokens)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._guard.turn_off("allocated")
            if external_tokens > 0:
                self._order_vain_load(request_id, block_ids)

    def build_step(self, view: StepView) -> StepMetadata:
        """Close the step: its orders, for every rank. Call once a step, whatever it does."""
        number = self._step
        try:
            if self._guard.is_off:
                return self._step_without_stores(number)
            return self._build_step(number, view)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._guard.turn_off("build_step")
            return self._step_without_stores(number)
        finally:
            self._step = number + 1

    def finished(
        self,
        request_id: str,
        computed_tokens: int,
        tokens_total: int,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
    ) -> bool:
        """A request has ended, however. Decides its last stores; its blocks are never held."""
        try:
            self._finished(request_id, computed_tokens, tokens_total, block_hashes, block_ids)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._guard.turn_off("finished")
        return False

    def take_late_stores(self) -> StepMetadata | None:
        """Stores decided since the last step, for a rank on this very thread; None if none."""
        try:
            stores = () if self._guard.is_off else self._emit(resend_generation=None)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._guard.turn_off("take_late_stores")
            return None
        return StepMetadata(self._step, stores) if stores else None

    def absorb(self, report: RankReport) -> None:
        """Take what ended on one rank or on several. A job ends when all ranks have reported."""
        try:
            now_s = self._clock()
            for store_end in report.stores:
                if not self._book.settle(store_end.rank, store_end.result, now_s):
                    self._guard.misuse(f"store job {store_end.result.job_id} ended unexpectedly")
            for load_end in report.loads:
                self._load_ended(load_end)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._guard.turn_off("absorb")

    def reset(self, timeout_s: float = 1.0) -> bool:
        """Make all that was stored unreachable; the one call that may wait. True: confirmed."""
        try:
            self._start_over()
            confirmed = self._port.reset(timeout_s)
            self._generation = self._port.generation
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            self._guard.turn_off("reset")
            return False
        return confirmed

    def has_pending_push(self) -> bool:
        """Whether the engine should step once more only to hand over what is decided."""
        if self._guard.is_off:
            return self._loads.has_orders
        if self._loads.has_orders or self._book.has_waiting():
            return True
        return (
            self._book.kept_blocks > 0
            and self._store_generation() is not None
            and self._book.has_due(self._clock())
        )

    def turn_off(self, hook: str) -> None:
        """Call while handling an exception of whoever drives this half: offload ends."""
        self._guard.turn_off(hook)

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            ledger=self._book.ledger.totals(),
            lookups=self._lookups.started,
            lookup_hit_blocks=self._lookups.hit_blocks,
            lookup_misses=dict(self._lookups.misses),
            loads=self._loads.ordered,
            loads_failed=self._loads.failed,
            loads_outstanding=self._loads.outstanding,
            skipped_blocks=dict(self._skipped),
            kept_blocks=self._book.kept_blocks,
            kept_blocks_dropped=self._book.kept_blocks_dropped,
            resets=self._resets,
            misuses=self._guard.misuses,
            is_off=self._guard.is_off,
        )

    def assert_balanced(self) -> None:
        """Raise AssertionError when the conservation law does not hold."""
        self._book.ledger.assert_balanced()

    # --- Lookup and admission --------------------------------------------------------------

    def _lookup(self, request: RequestView, computed_tokens: int) -> int | None:
        state = self._holdings.find(request.request_id)
        if state.blocks:
            # It has none of them any more: preempted, though no step has told us yet.
            state.give_up_blocks()
        # Rescheduled from zero: what it will compute no longer leans on what a reset dropped.
        state.barred = False
        state.local_tokens = computed_tokens
        if computed_tokens % self._block_tokens:
            self._lookups.misses["unaligned"] += 1
            return 0
        if state.load_failed or state.load_job is not None:
            return 0
        self._notice_generation()
        return self._lookups.ask(request, computed_tokens)

    def _allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        state = self._holdings.admitted(request_id, block_ids, self._block_tokens, self._step)
        if external_tokens > 0:
            self._order_load(state, external_tokens)
        else:
            self._lookups.drop(request_id)

    def _order_load(self, state: RequestState, external_tokens: int) -> None:
        begin = state.local_tokens // self._block_tokens
        end = begin + external_tokens // self._block_tokens
        admission = self._lookups.admit(state.request_id, state.local_tokens, external_tokens)
        aligned = external_tokens % self._block_tokens == 0 and end <= len(state.blocks)
        if self._guard.is_off or not aligned or admission is None or state.load_job is not None:
            self._order_vain_load(state.request_id, state.blocks[begin:])
            if not self._guard.is_off:
                self._guard.misuse(
                    f"{state.request_id}: {external_tokens} tokens to load that were not offered"
                )
            return
        state.loaded_begin = state.loaded_end = begin
        state.load_job = self._loads.order(
            state.request_id, admission, begin, state.blocks[begin:end]
        )

    def _order_vain_load(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The engine counts on bytes that nobody will bring: have them reported as failed."""
        job_id = self._loads.order_vain(request_id, block_ids)
        state = self._requests.get(request_id)
        if state is not None:
            state.load_job, state.load_failed = job_id, True

    # --- One step ----------------------------------------------------------------------------

    def _build_step(self, number: int, view: StepView) -> StepMetadata:
        self._notice_generation()
        self._lookups.renew_leases()
        self._holdings.take_progress(number, view)
        generation = self._store_generation()
        if generation is not None:
            for progress in view.progress:
                state = self._requests[progress.request_id]
                limit = min(
                    len(progress.block_hashes),
                    len(state.blocks),
                    progress.computed_tokens_after // self._block_tokens,
                )
                if limit > state.cursor:
                    self._fresh.decide(state, limit, progress.block_hashes, generation)
        return StepMetadata(
            number,
            self._emit(resend_generation=self._store_generation()),
            self._loads.take_orders(),
            self._book.take_fences(),
            self._loads.take_doomed(),
        )

    def _emit(self, *, resend_generation: int | None) -> tuple[StoreOrder, ...]:
        limits, now_s = self._port.limits, self._clock()
        if limits is None:
            return ()
        return self._book.emit(limits.store_blocks_max, now_s, resend_generation)

    def _step_without_stores(self, number: int) -> StepMetadata:
        """Off: nothing is stored or loaded any more, and every load ordered ends as failed."""
        self._book.fence_all()
        self._loads.make_orders_vain()
        self._loads.doom_all()
        return StepMetadata(
            number,
            (),
            self._loads.take_orders(),
            self._book.take_fences(),
            self._loads.take_doomed(),
        )

    # --- Ends ----------------------------------------------------------------------------------

    def _finished(
        self,
        request_id: str,
        computed_tokens: int,
        tokens_total: int,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
    ) -> None:
        self._lookups.drop(request_id)
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        if state.load_job is not None:
            # Aborted while its load is out. The engine keeps the blocks until it is reported.
            self._loads.doom(state.load_job)
            return
        # The last token was sampled and never computed: a block that ends in it has no KV.
        # Nor was what the engine counts before its bytes are there: loads of other connectors.
        computed = min(computed_tokens, tokens_total - 1, state.scheduled_tokens)
        limit = min(len(block_hashes), len(block_ids), computed // self._block_tokens)
        if limit <= state.cursor or self._guard.is_off or state.barred:
            return
        # Ranks may still be missing, as far as we have heard: the daemon knows better, and what it
        # rejects for that is kept and sent again.
        generation = self._port.generation
        if generation is None:
            self._skipped["not_connected"] += limit - state.cursor
            return
        state.blocks[:] = block_ids
        self._fresh.decide(state, limit, block_hashes, generation)

    def _load_ended(self, end: LoadEnd) -> None:
        expected, load = self._loads.settle(end)
        if not expected:
            self._guard.misuse(f"load job {end.job_id} ended unexpectedly on rank {end.rank}")
        if load is None:
            return
        if not load.is_good and load.lease_id is not None:
            self._port.release((load.lease_id,))
        state = self._requests.get(load.request_id)
        if state is None or state.load_job != end.job_id:
            return
        state.load_job = None
        if load.is_good:
            state.loaded_begin, state.loaded_end = load.begin, load.end
        else:
            state.load_failed = True

    # --- Generations -----------------------------------------------------------------------------

    def _store_generation(self) -> int | None:
        """The generation under which stores may be decided now; None when there is no use in it."""
        if not self._port.accepting or not self._port.instance_complete:
            return None
        return self._port.generation

    def _notice_generation(self) -> None:
        """Somebody else may have reset the namespace: then ours is as old as theirs."""
        generation = self._port.generation
        if generation is None or generation == self._generation:
            return
        if self._generation is not None:
            self._start_over()
        self._generation = generation

    def _start_over(self) -> None:
        """A reset: nothing of before may be stored, loaded or answered any more."""
        self._resets += 1
        self._fresh.reset()
        self._lookups.drop_all()
        self._book.reset(Reason.STALE_GENERATION)
        for state in self._requests.values():
            state.barred = True
        self._loads.doom_all()

    def _next_job_id(self) -> int:
        self._jobs += 1
        return self._jobs

"""The test engine's scheduler: vLLM's order of decisions and hooks, without a model.

Owns requests, queue and block table. Engine thread. Drives the scheduler half exactly as
vLLM drives a connector: lookup, allocated, build_step; finished; absorb.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvoffd_client.engine.types import RequestProgress, RequestView, StepView
from tests.engine.blocks import BlockTable
from tests.engine.content import TokenChain
from tests.engine.request import Request, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvoffd_client.engine.metadata import StepMetadata
    from kvoffd_client.engine.scheduler import SchedulerHalf
    from tests.engine.workload import Arrival, Plan


@dataclass(slots=True)
class Forward:
    """One request's part of a step: compute the tokens from first to after - 1."""

    request: Request
    first: int
    after: int


@dataclass(slots=True)
class EngineStep:
    """What the scheduler hands to the ranks."""

    number: int
    forwards: list[Forward] = field(default_factory=list)
    metadata: StepMetadata | None = None
    #: Destinations of loads decided in this step: to be poisoned once fences are raised.
    destinations: list[int] = field(default_factory=list)
    #: Blocks entered into the prefix cache ahead of their forward.
    remembered: list[int] = field(default_factory=list)


class EngineScheduler:
    """One engine's scheduler. `half` is the product's; everything else is the test's."""

    def __init__(self, plan: Plan, half: SchedulerHalf) -> None:
        self.half = half
        self.plan = plan
        self.table = BlockTable(plan.shape.blocks, reuse_at_once=plan.habits.reuses_at_once)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        #: Destinations of loads that were not reported yet; reading one is the worst of bugs.
        self.loading_blocks: set[int] = set()
        #: Told of a load's end before its request goes on: request, and its destinations.
        self.on_received: Callable[[Request, list[int]], None] = lambda _request, _blocks: None
        self._destinations: list[int] = []
        self.counts: dict[str, int] = dict.fromkeys(
            ("preemptions", "loads", "failed_loads", "aborts", "aborted_loads", "local_hits"), 0
        )
        self._finished_since_step = False
        self._preempted_by_reset: list[str] = []
        self._block_tokens = plan.shape.block_tokens

    # --- What comes from outside ---------------------------------------------------

    def add(self, name: str, arrival: Arrival) -> Request:
        chain = TokenChain(self.plan.salt, list(arrival.prompt), self._block_tokens)
        request = Request(f"{self.plan.engine}-{name}", arrival, chain)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """A client has gone. Blocks that a load may still write to stay with the request."""
        if request.status is Status.FINISHED:
            return
        request.aborted = True
        self.counts["aborts"] += 1
        self._end(request)

    def drop_prefix_cache(self) -> bool:
        """As `reset_prefix_cache`: only when no request has blocks."""
        if not self.table.all_free:
            return False
        self.table.forget_all()
        return True

    def reset(self) -> bool:
        """As `reset_prefix_cache(reset_running_requests, reset_connector)`."""
        for request in list(self.running):
            self._preempt(request)
            self._preempted_by_reset.append(request.request_id)
        for request in list(self.waiting):
            out = request.status is Status.LOADING and not request.load_done
            if out and request.loading_from > 0:
                # Its local prefix is of before; vLLM would refuse the reset.
                self.abort(request)
            elif not out and request.blocks:
                self.table.give_back(request.blocks)
                request.blocks = []
                request.computed = 0
                request.status = Status.PREEMPTED
        self.table.forget_all()
        return bool(self.half.reset())

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or self._finished_since_step or self.half.has_pending_push()

    # --- One step -------------------------------------------------------------------

    def schedule(self, number: int, *, paused: bool) -> EngineStep:
        step = EngineStep(number)
        self._destinations = step.destinations
        preempted, self._preempted_by_reset = self._preempted_by_reset, []
        by_reset = len(preempted)
        admitted: list[tuple[Request, bool]] = []
        grown: dict[str, list[int]] = {}
        budget = 0 if paused else self.plan.habits.step_tokens_max
        budget = self._schedule_running(step, budget, preempted, grown)
        if len(preempted) == by_reset and not paused:
            self._schedule_waiting(step, budget, admitted)
        resumed = {request.request_id for request, again in admitted if again}
        fresh = {request.request_id for request, _ in admitted}
        progress = [
            RequestProgress(
                request_id=forward.request.request_id,
                new_block_ids=tuple(
                    forward.request.blocks
                    if forward.request.request_id in fresh
                    else grown.get(forward.request.request_id, ())
                ),
                computed_tokens_after=forward.after,
                is_resumed=forward.request.request_id in resumed,
                block_hashes=forward.request.chain.hashes,
            )
            for forward in step.forwards
        ]
        step.metadata = self.half.build_step(
            StepView(progress=progress, preempted_request_ids=preempted, copied_block_ids=())
        )
        for forward in step.forwards:
            forward.request.computed = forward.after
        self._finished_since_step = False
        return step

    def _schedule_running(
        self, step: EngineStep, budget: int, preempted: list[str], grown: dict[str, list[int]]
    ) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.tokens_total - request.computed, budget)
            missing = self._blocks_for(request.computed + count) - len(request.blocks)
            while not self.table.room_for((), missing):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    break
            if request.status is not Status.RUNNING:
                break
            taken = self.table.take(missing)
            grown[request.request_id] = taken
            request.blocks += taken
            self._enter(step, request, count)
            budget -= count
            index += 1
        return budget

    def _schedule_waiting(
        self, step: EngineStep, budget: int, admitted: list[tuple[Request, bool]]
    ) -> None:
        # Those that hold blocks go first, or two of them could wait for each other's for ever.
        for request in sorted(self.waiting, key=lambda one: not one.blocks):
            if budget <= 0 or len(self.running) >= self.plan.habits.running_max:
                return
            if request.status is Status.LOADING:
                if not request.load_done:
                    continue
                self._promote(request)
            local: list[int] = []
            if request.computed == 0 and not request.blocks:
                blocks_max = (request.tokens_total - 1) // self._block_tokens
                local = self.table.prefix_of(request.chain.hashes, blocks_max)
                external = self.half.lookup(self._view(request), len(local) * self._block_tokens)
                if external is None:
                    continue
                assert external % self._block_tokens == 0, external
                if external > 0:
                    if not self._begin_load(request, local, external):
                        return
                    continue
            count = self._admit(request, local, budget)
            if count is None:
                return
            self.waiting.remove(request)
            self.running.append(request)
            admitted.append((request, request.status is Status.PREEMPTED))
            request.status = Status.RUNNING
            self._enter(step, request, count)
            budget -= count

    def _admit(self, request: Request, local: list[int], budget: int) -> int | None:
        computed = request.computed + len(local) * self._block_tokens
        count = min(request.tokens_total - computed, budget)
        missing = self._blocks_for(computed + count) - len(request.blocks) - len(local)
        if not self.table.room_for(local, missing):
            return None
        self.counts["local_hits"] += len(local)
        self.table.share(local)
        request.blocks += local + self.table.take(missing)
        request.computed = computed
        self.half.allocated(request.request_id, tuple(request.blocks), 0)
        return count

    def _begin_load(self, request: Request, local: list[int], external: int) -> bool:
        computed = len(local) * self._block_tokens + external
        assert computed <= request.tokens_total, (computed, request.tokens_total)
        missing = self._blocks_for(computed) - len(local)
        reserved = sum(
            max(0, self._blocks_for(self._tokens_max(one)) - len(one.blocks))
            for one in self.waiting
            if one.blocks
        )
        own = self._blocks_for(self._tokens_max(request)) - len(local)
        if not self.table.room_for(local, max(missing, own) + reserved):
            return False
        self.table.share(local)
        fresh = self.table.take(missing)
        request.blocks = local + fresh
        request.loading_from = len(local) * self._block_tokens
        request.computed = computed
        request.load_done = request.load_failed = False
        self.loading_blocks.update(fresh)
        self._destinations += fresh
        self.half.allocated(request.request_id, tuple(request.blocks), external)
        self.counts["loads"] += 1
        # Whether it is a first or a later admission is known by its preemptions.
        request.status = Status.LOADING
        return True

    def _promote(self, request: Request) -> None:
        """A load has ended: as `_update_waiting_for_remote_kv`."""
        if request.load_failed and request.computed == 0:
            self.table.give_back(request.blocks)
            request.blocks = []
        else:
            self._remember_full(request, request.computed, None)
            if request.computed == request.tokens_total:
                request.computed -= 1
        request.status = Status.PREEMPTED if request.preemptions else Status.WAITING

    def _enter(self, step: EngineStep, request: Request, count: int) -> None:
        after = request.computed + count
        step.forwards.append(Forward(request, request.computed, after))
        self._remember_full(request, after, step)

    def _remember_full(self, request: Request, computed: int, step: EngineStep | None) -> None:
        for index in range(min(computed // self._block_tokens, len(request.chain.hashes))):
            entered = self.table.remember(request.blocks[index], request.chain.hashes[index])
            if entered and step is not None:
                step.remembered.append(request.blocks[index])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.table.give_back(request.blocks)
        request.blocks = []
        request.computed = 0
        request.preemptions += 1
        request.status = Status.PREEMPTED
        self.waiting.insert(0, request)
        self.counts["preemptions"] += 1

    # --- What the ranks answer ------------------------------------------------------

    def update(
        self,
        step: EngineStep,
        failed_blocks: set[int],
        received: Iterable[str],
        report: Any,
    ) -> None:
        """As `update_from_output`: failed blocks, then tokens, then the connector's reports."""
        self._mark_failed(failed_blocks)
        for forward in step.forwards:
            request = forward.request
            if request.status is not Status.RUNNING or request.computed < request.tokens_total:
                continue
            request.chain.append_answer()
            if request.answered >= request.arrival.answer_tokens:
                self._end(request)
        if report is not None:
            self.half.absorb(report)
        for request_id in received:
            self._received(request_id)

    def undo(self, step: EngineStep) -> None:
        """The forward raised: nothing of this step was computed, on some ranks at least.

        vLLM ends here. An engine that lives on must give up everything that leans on the step.
        """
        unwritten = set(step.remembered)
        for block in step.remembered:
            self.table.forget_hash(block)
        entered = {forward.request for forward in step.forwards}
        for forward in step.forwards:
            forward.request.computed = forward.first
        for request in list(self.requests.values()):
            if request in entered or unwritten.intersection(request.blocks):
                if request.status is Status.LOADING:
                    request.computed = 0
                self.abort(request)

    def _mark_failed(self, failed_blocks: set[int]) -> None:
        strangers = failed_blocks - self.loading_blocks
        assert not strangers, f"blocks {strangers} reported as failed were not being loaded"
        for request in self.requests.values():
            hurt = [index for index, block in enumerate(request.blocks) if block in failed_blocks]
            if not hurt:
                continue
            assert request.status in {Status.LOADING, Status.FINISHED}, (
                f"{request.request_id} is {request.status} and reads blocks of a failed load"
            )
            request.load_failed = True
            if request.status is Status.LOADING:
                request.computed = min(request.computed, hurt[0] * self._block_tokens)

    def _received(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        assert request is not None, f"{request_id} was reported as received, but is gone"
        assert not request.load_done, f"{request_id} was reported as received twice"
        begin = request.loading_from // self._block_tokens
        destinations = request.blocks[begin:]
        self.on_received(request, destinations)
        self.loading_blocks.difference_update(destinations)
        self.counts["failed_loads"] += request.load_failed
        if request.status is Status.LOADING:
            request.load_done = True
            request.loaded_tokens += max(0, request.computed - request.loading_from)
            return
        assert request.status is Status.FINISHED, f"{request_id} is {request.status}"
        self._free(request)

    # --- Ends -------------------------------------------------------------------------

    def _end(self, request: Request) -> None:
        """As `_free_request`: the half is asked, then blocks go back unless a load is out."""
        loading = request.status is Status.LOADING and not request.load_done
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        self._finished_since_step = True
        held = self.half.finished(
            request.request_id,
            request.computed,
            request.tokens_total,
            request.chain.hashes,
            tuple(request.blocks),
        )
        assert held is False, "blocks are never held"
        if loading:
            self.counts["aborted_loads"] += 1
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.table.give_back(request.blocks)
        del self.requests[request.request_id]

    def _view(self, request: Request) -> RequestView:
        return RequestView(
            request_id=request.request_id,
            block_hashes=request.chain.hashes,
            tokens_total=request.tokens_total,
        )

    @staticmethod
    def _tokens_max(request: Request) -> int:
        return len(request.arrival.prompt) + request.arrival.answer_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

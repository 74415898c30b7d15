"""The test engine's rank: runs a step's forward and the rank half's hooks in vLLM's order.

Owns one pool. Engine thread. The order is that of the V1 runner, with each release's habits.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.engine.daemon import wait_a_little

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd_client.engine.metadata import StepMetadata
    from kvoffd_client.engine.rank import RankHalf
    from tests.engine.pool import Pool
    from tests.engine.scheduler import EngineScheduler, EngineStep
    from tests.engine.workload import Habits


class ForwardRaised(Exception):
    """The test's own exception in a forward; never leaves the engine."""


@dataclass(slots=True)
class RankAnswer:
    """What a rank sends back after a step, as `KVConnectorOutput`."""

    received: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    report: Any = None
    raised: bool = False


class EngineRank:
    """One rank: `half` is the product's, `pool` the oracle's."""

    def __init__(
        self, half: RankHalf, pool: Pool, habits: Habits, forward_s: float | None = None
    ) -> None:
        self.half = half
        self.pool = pool
        self._habits = habits
        self._forward_s = habits.forward_s if forward_s is None else forward_s
        regions = range(len(pool.regions))
        drafts = habits.draft_after_finish and len(regions) > 1
        self._main_regions = regions[:-1] if drafts else regions
        self._draft_regions = regions[-1:] if drafts else range(0)
        #: Called between the finish hook and the draft forward; a test may wait here.
        self.before_draft: Callable[[], None] = lambda: None

    def execute(
        self, step: EngineStep, scheduler: EngineScheduler, weights: int, *, raises: bool
    ) -> RankAnswer:
        """One step on this rank. Metadata crosses a process boundary, so it is pickled."""
        metadata: StepMetadata = pickle.loads(pickle.dumps(step.metadata))  # noqa: S301 - our own
        answer = RankAnswer()
        self.half.handle_fences(metadata)
        for block in step.destinations:
            self.pool.poison(block)
        try:
            self._run_with_hooks(step, scheduler, weights, metadata, answer, raises=raises)
        except ForwardRaised:
            answer.raised = True
        return answer

    def _run_with_hooks(
        self,
        step: EngineStep,
        scheduler: EngineScheduler,
        weights: int,
        metadata: StepMetadata,
        answer: RankAnswer,
        *,
        raises: bool,
    ) -> None:
        if self._habits.loads_before_forward:
            self.half.start_loads(metadata)
        try:
            self._forward(step, scheduler, weights, self._main_regions, raises=raises)
        finally:
            if not self._habits.loads_before_forward:
                self.half.start_loads(metadata)
            # `wait_for_save` is empty in the connector; nothing to call either way.
            self._finish(metadata, answer)
            if self._habits.finishes_twice and step.number % 3 == 0:
                self._finish(metadata, answer)
            if not self._draft_regions:
                self._clear(step)
        if self._draft_regions:
            self.before_draft()
            self._forward(step, scheduler, weights, self._draft_regions, raises=False)
            self._clear(step)

    def _clear(self, step: EngineStep) -> None:
        if not (self._habits.skips_clear and step.number % 4):
            self.half.end_step()

    def _finish(self, metadata: StepMetadata, answer: RankAnswer) -> None:
        loads = self.half.finish_step(metadata)
        twice = answer.received.intersection(loads.request_ids)
        assert not twice, f"{twice} named twice as received"
        answer.received.update(loads.request_ids)
        answer.failed_blocks |= self.half.take_failed_blocks()
        report = self.half.take_report()
        if report is not None:
            answer.report = report if answer.report is None else answer.report.merged(report)

    def _forward(
        self,
        step: EngineStep,
        scheduler: EngineScheduler,
        weights: int,
        regions: range,
        *,
        raises: bool,
    ) -> None:
        if not regions:
            return
        # Ranks compute at the same time; ours take turns, so one of them waits for all.
        if step.forwards and self._forward_s and self.pool.rank == 0:
            wait_a_little(self._forward_s)
        # A forward that raises has done a part of its work, and nobody knows which.
        done = len(step.forwards) // 2 if raises else len(step.forwards)
        for forward in step.forwards[:done]:
            request = forward.request
            unproven = scheduler.loading_blocks.intersection(request.blocks)
            assert not unproven, (
                f"{request.request_id} runs although the loads of {unproven} are not proven"
            )
            self.pool.check_tokens(
                request.chain,
                request.blocks,
                forward.first,
                weights,
                f"{request.request_id} in step {step.number}",
                regions,
            )
            self.pool.write_tokens(
                request.chain, request.blocks, forward.first, forward.after, weights, regions
            )
        if raises:
            raise ForwardRaised

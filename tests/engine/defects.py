"""Broken halves: each breaks one promise, and the oracle must see it.

A defect wraps the product's halves of one engine process; everything else stays real. What a
defect needs to show itself (an engine's habits, raising forwards) it asks for.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from tests.engine.daemon import wait_a_little

if TYPE_CHECKING:
    from tests.engine.engine import TestEngine
    from tests.engine.workload import Plan

# No lease has this number.
_NO_LEASE = 1 << 40


class HalfWrapper:
    """Passes everything on to the half inside."""

    def __init__(self, inside: Any) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)


class Defect:
    """Nothing broken; what the others change is what they are about."""

    name = "none"

    def plan(self, plan: Plan) -> Plan:
        """The same plan with what this defect needs to be seen."""
        return plan

    def scheduler(self, half: Any) -> Any:
        return half

    def rank(self, half: Any) -> Any:
        return half

    def arm(self, engine: TestEngine) -> None:
        """Change the engine's own timing, never its checks."""


def _with_habits(plan: Plan, **habits: Any) -> Plan:
    return dataclasses.replace(plan, habits=dataclasses.replace(plan.habits, **habits))


class IgnoresFences(Defect):
    """A store goes on although its blocks were handed to somebody else."""

    name = "ignores-fences"

    def plan(self, plan: Plan) -> Plan:
        return _with_habits(plan, reuses_at_once=True, forward_s=0.0)

    def rank(self, half: Any) -> Any:
        class Wrapper(HalfWrapper):
            def handle_fences(self, metadata: Any) -> None:
                self._inside.handle_fences(dataclasses.replace(metadata, fences=()))

        return Wrapper(half)


class RingsEarly(Defect):
    """The doorbell is rung in the finish hook, while a draft forward is still to come."""

    name = "rings-early"

    def plan(self, plan: Plan) -> Plan:
        layers = max(2, plan.shape.layers)
        shape = dataclasses.replace(plan.shape, layers=layers)
        return dataclasses.replace(_with_habits(plan, draft_after_finish=True), shape=shape)

    def rank(self, half: Any) -> Any:
        class Wrapper(HalfWrapper):
            def finish_step(self, metadata: Any) -> Any:
                loads = self._inside.finish_step(metadata)
                self._inside.end_step()
                return loads

        return Wrapper(half)

    def arm(self, engine: TestEngine) -> None:
        for rank in engine.ranks:
            rank.before_draft = lambda: wait_a_little(0.02)


class FailsLoadsSilently(Defect):
    """Loads that fail are reported as received, without their failed blocks."""

    name = "fails-loads-silently"

    def rank(self, half: Any) -> Any:
        class Wrapper(HalfWrapper):
            def start_loads(self, metadata: Any) -> None:
                loads = tuple(
                    dataclasses.replace(load, lease_id=_NO_LEASE) for load in metadata.loads
                )
                self._inside.start_loads(dataclasses.replace(metadata, loads=loads))

            def take_failed_blocks(self) -> set[int]:
                self._inside.take_failed_blocks()
                return set()

        return Wrapper(half)


class PublishesRaisedForwards(Defect):
    """The finish hook does not see that the forward raised."""

    name = "publishes-raised-forwards"

    def plan(self, plan: Plan) -> Plan:
        raises = {step: tuple(range(plan.ranks)) for step in range(3, 160, 4)}
        return dataclasses.replace(plan, raises=raises)

    def rank(self, half: Any) -> Any:
        class Wrapper(HalfWrapper):
            def finish_step(self, metadata: Any) -> Any:
                # Another thread has no exception in flight.
                found: list[Any] = []
                thread = threading.Thread(
                    target=lambda: found.append(self._inside.finish_step(metadata))
                )
                thread.start()
                thread.join()
                return found[0]

            def end_step(self) -> None:
                thread = threading.Thread(target=self._inside.end_step)
                thread.start()
                thread.join()

        return Wrapper(half)


class StoresTheFinalToken(Defect):
    """The block that ends in the final sampled token is stored; its KV was never written."""

    name = "stores-the-final-token"

    def scheduler(self, half: Any) -> Any:
        class Wrapper(HalfWrapper):
            def finished(
                self, request_id: str, computed: int, total: int, hashes: Any, blocks: Any
            ) -> bool:
                state = self._inside._requests.get(request_id)
                if state is not None:
                    state.scheduled_tokens += 1
                ended: bool = self._inside.finished(
                    request_id, computed + 1, total + 1, hashes, blocks
                )
                return ended

        return Wrapper(half)


class ForgetsTheReset(Defect):
    """A reset is answered with success, and never reaches the daemon."""

    name = "forgets-the-reset"

    def plan(self, plan: Plan) -> Plan:
        return dataclasses.replace(
            plan,
            salt=f"{plan.salt} of {plan.engine}",
            resets=frozenset(range(30, 160, 30)),
            reset_changes_weights=True,
        )

    def scheduler(self, half: Any) -> Any:
        class Wrapper(HalfWrapper):
            def reset(self) -> bool:
                return True

        return Wrapper(half)


DEFECTS: dict[str, Defect] = {
    defect.name: defect
    for defect in (
        IgnoresFences(),
        RingsEarly(),
        FailsLoadsSilently(),
        PublishesRaisedForwards(),
        StoresTheFinalToken(),
        ForgetsTheReset(),
    )
}

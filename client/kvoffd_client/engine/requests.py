"""What the scheduler half remembers of one living request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestState:
    """Plain state, changed by the scheduler half alone.

    `cursor` counts leading blocks that were put into a store job, or need none.
    `admitted_step` is the step in which the engine last told us all its blocks.
    """

    request_id: str
    blocks: list[int] = field(default_factory=list)
    cursor: int = 0
    admitted_step: int = 0
    #: Tokens that the engine found in its own cache when it last asked for more.
    local_tokens: int = 0
    #: The most tokens that a step was to compute for it: what is done at most, whoever counts.
    scheduled_tokens: int = 0
    #: Alive at a reset: what it computes leans on what the reset dropped.
    barred: bool = False
    #: A load of it failed: it recomputes, and does not try its luck again.
    load_failed: bool = False
    load_job: int | None = None
    #: Blocks that came by a load reported good: present at the daemon already.
    loaded_begin: int = 0
    loaded_end: int = 0

    def give_up_blocks(self) -> None:
        """Preempted, or about to be admitted from zero: nothing of the blocks is ours."""
        self.blocks.clear()
        self.cursor = 0
        self.scheduled_tokens = 0
        self.loaded_begin = self.loaded_end = 0

"""One request inside the test engine: plain state, changed by the scheduler alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.engine.content import TokenChain
    from tests.engine.workload import Arrival


class Status(enum.Enum):
    """Where a request is, in the order in which most pass through."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """What vLLM keeps of a request, under the same names where there are such."""

    request_id: str
    arrival: Arrival
    chain: TokenChain
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    #: Tokens whose KV is in our pool, loaded ones included before their bytes arrive.
    computed: int = 0
    #: Leading tokens of this admission that came by a load.
    loading_from: int = 0
    preemptions: int = 0
    aborted: bool = False
    load_done: bool = False
    load_failed: bool = False
    #: Tokens taken from a load that was reported good, over the request's life.
    loaded_tokens: int = 0

    @property
    def tokens_total(self) -> int:
        return len(self.chain.tokens)

    @property
    def answered(self) -> int:
        return len(self.chain.tokens) - len(self.arrival.prompt)

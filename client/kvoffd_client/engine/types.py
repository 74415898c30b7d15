"""What an engine's adaptor tells the halves, and the halves' options.

Plain values. Owns no state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvoffd_client.ledger import LedgerTotals


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that the engine would like to admit.

    `block_hashes` covers whole blocks of `tokens_total` tokens and may grow with them.
    """

    request_id: str
    block_hashes: Sequence[bytes]
    tokens_total: int


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """What one scheduled request has after this step.

    `new_block_ids` is appended to what the request had; for a request that is
    resumed, or admitted in this very step, it is all that the request has.
    A request whose counts cross no block boundary may be left out of a step,
    unless it was given blocks.
    """

    request_id: str
    new_block_ids: Sequence[int]
    computed_tokens_after: int
    is_resumed: bool
    block_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as the engine scheduled it.

    `copied_block_ids` are blocks that the step overwrites by copying others.
    """

    progress: Sequence[RequestProgress] = ()
    preempted_request_ids: Collection[str] = ()
    copied_block_ids: Collection[int] = ()


EMPTY_STEP = StepView()


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How the scheduler half behaves. `strict` raises on misuse instead of counting it."""

    ranks_total: int
    strict: bool = False
    group: int = 0
    # All that a request may spend on lookups, over all tries. Smaller than 30 ms and a busy
    # scheduler thread turns hits into misses: a round trip beside it takes 6-15 ms.
    lookup_deadline_s: float = 0.05
    # A lease this near its end is not trusted to live until its load begins, which may
    # be after the forward of a whole step.
    lease_margin_s: float = 1.0
    # Blocks whose store the daemon did not acknowledge, kept to be sent again. Oldest go first.
    kept_blocks_max: int = 65_536
    # The first pause before a store is sent again; doubles up to the second figure.
    resend_pause_s: float = 0.5
    resend_pause_max_s: float = 30.0

    def __post_init__(self) -> None:
        assert self.ranks_total > 0, "an instance has ranks"
        assert self.lookup_deadline_s >= 0.03, "a lookup needs 30 ms beside a busy scheduler"  # noqa: PLR2004 - the figure is explained above


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How a rank half behaves. `strict` raises on misuse instead of counting it."""

    rank: int
    strict: bool = False
    # From hand-over to the last moment at which a load may still be under way unasked.
    load_deadline_s: float = 5.0


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """A reading of the scheduler half. The ledger counts each job once, whatever its ranks."""

    ledger: LedgerTotals
    lookups: int = 0
    lookup_hit_blocks: int = 0
    lookup_misses: Mapping[str, int] = field(default_factory=dict)
    loads: int = 0
    loads_failed: int = 0
    loads_outstanding: int = 0
    skipped_blocks: Mapping[str, int] = field(default_factory=dict)
    kept_blocks: int = 0
    kept_blocks_dropped: int = 0
    resets: int = 0
    misuses: int = 0
    is_off: bool = False


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """A reading of a rank half. `loads_unproven` wait for a copier's lock or death."""

    ledger: LedgerTotals
    loads: int = 0
    loads_failed: Mapping[str, int] = field(default_factory=dict)
    loads_outstanding: int = 0
    loads_unproven: int = 0
    misuses: int = 0
    is_off: bool = False

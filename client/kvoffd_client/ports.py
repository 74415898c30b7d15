"""The door between an engine's threads and a session: plain values and two protocols.

Owns no state. Everything here is made and read on the engine's threads, so it
knows neither protobuf nor gRPC nor asyncio: turning these values into messages
is the background thread's work. Simulations replace a session by implementing
`RankPort` or `SchedulerPort`.

Times that end in `deadline_s` are absolute, on the session's clock
(`time.monotonic` unless another one was passed in).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# One place in so many, among jobs in flight and among tickets, is kept for loads: a burst of
# stores must not be the reason that a request recomputes what is there.
LOADS_PART = 8


class SessionState(enum.StrEnum):
    """Where a session stands. Only UP takes work."""

    ABSENT = "absent"  # no daemon was reached yet
    CONNECTING = "connecting"
    UP = "up"
    LOST = "lost"  # it was up; tried again with back-off
    REFUSED = "refused"  # the daemon said no for good; asked again once in a long while
    CLOSED = "closed"  # close() was called, or this is a forked child's copy


class Reason(enum.StrEnum):
    """Why blocks were not stored, a load failed, or a lookup has no answer."""

    # The daemon chose not to store.
    NO_SLOT = "no_slot"
    STALE_GENERATION = "stale_generation"
    NOT_COMPLETE = "not_complete"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    # The daemon tried and could not.
    REVOKED = "revoked"
    COPIER = "copier"
    DEADLINE = "deadline"
    RANK_LOST = "rank_lost"
    GENERATION_MOVED = "generation_moved"
    LEASE_NOT_FOUND = "lease_not_found"
    # The session's own answers; nobody else knows the outcome.
    NOT_CONNECTED = "not_connected"  # never sent
    CONNECTION_LOST = "connection_lost"  # sent, and the daemon did not answer
    OVER_LIMIT = "over_limit"  # larger than this daemon accepts; never sent
    PROTOCOL = "protocol"  # the daemon's answer makes no sense
    UNKNOWN = "unknown"  # a newer daemon's reason


@dataclass(frozen=True, slots=True)
class Limits:
    """What the daemon accepts from this session, told at the handshake."""

    store_blocks_max: int
    load_blocks_max: int
    lookup_blocks_max: int
    jobs_in_flight_max: int
    heartbeat_s: float
    lease_ttl_s: float
    memories_max: int


@dataclass(frozen=True, slots=True)
class StoreWork:
    """One store job of one rank: consecutive blocks of one prefix.

    `block_hashes` and `block_ids` are equally long. `parent_hash` is the hash
    of the block before the first, empty at the start of a prefix.
    """

    job_id: int
    generation: int
    group: int
    ticket_cell: int
    bell: int
    parent_hash: bytes
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadWork:
    """One load job of one rank: where the blocks of a lease go.

    `skip_blocks` of the lease are passed over, then each goes to one of
    `block_ids`. The daemon is given what is left until `deadline_s` when the
    message leaves. `lease_id` is the lookup result's, opaque: it names the daemon
    that granted the lease, too, and a rank that is connected to another one
    answers LEASE_NOT_FOUND by itself.
    """

    job_id: int
    generation: int
    ticket_cell: int
    bell: int
    lease_id: int
    skip_blocks: int
    block_ids: tuple[int, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """All that a rank hands over in one engine step.

    `revoked_job_ids` are hints that let the daemon stop early; the ticket page
    is the proof, so they may be lost without harm.
    """

    stores: tuple[StoreWork, ...] = ()
    loads: tuple[LoadWork, ...] = ()
    revoked_job_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """So many blocks for this reason."""

    reason: str
    blocks: int


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The end of one store job on one rank; comes once for each job handed over.

    stored + present + all of rejected + all of failed = blocks of the job.

    `from_daemon` False means that the session answered in the daemon's place
    (not connected, connection lost, over a limit). After CONNECTION_LOST and
    PROTOCOL the copy may still be running: **revoke the ticket cell before the
    blocks may be handed out again**, that is before the result is reported.
    """

    job_id: int
    stored: int = 0
    present: int = 0
    rejected: tuple[ReasonCount, ...] = ()
    failed: tuple[ReasonCount, ...] = ()
    from_daemon: bool = True


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was said of one load job on one rank; comes once for each job handed over.

    `reason` is None when the daemon reports the load as done. It is a hint and
    never the proof: the ticket cell decides (`TicketPage.try_end_load`), for
    good results and for bad ones.
    """

    job_id: int
    reason: Reason | None
    from_daemon: bool = True


@dataclass(frozen=True, slots=True)
class Completions:
    """What ended since the last drain, each job once."""

    stores: tuple[StoreResult, ...] = ()
    loads: tuple[LoadResult, ...] = ()


NO_COMPLETIONS = Completions()


class RankPort(Protocol):
    """A rank's way to the daemon. All methods belong to one engine thread and never wait.

    `close` is the exception: it may wait, within its bound.
    """

    @property
    def state(self) -> SessionState:
        """Where the session stands; a plain read that may be outdated at once."""

    @property
    def limits(self) -> Limits | None:
        """The daemon's limits; None before the first welcome, kept while it is lost."""

    def hand_over(self, step: Step) -> None:
        """Pass a step's jobs on; takes microseconds whatever the daemon does.

        Every job of the step gets exactly one result from a later `drain`, also
        when it cannot be sent: NOT_CONNECTED, OVERLOADED, OVER_LIMIT, CONNECTION_LOST.
        A step is sent on the connection that was up when it was handed over, or never:
        nothing is sent again after a reconnect. Job ids must not repeat.
        """

    def drain(self) -> Completions:
        """All results since the last call; `NO_COMPLETIONS` when there are none."""

    def copier_gone(self, ticket_cell: int, incarnation: int) -> bool:
        """Whether the copier that started this cell's load is proven to be gone.

        For a cell that `try_end_load` found INTERRUPTED, with the incarnation
        written in it. True only when the pidfd of that process is readable: the
        kernel has ended all its writes. False is no statement; ask again later.
        """

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what is left, await open stores within the bound, say goodbye.

        Work handed over afterwards ends as NOT_CONNECTED. Results of before
        can still be drained. Never raises, may be called twice.
        """


class RenewFailed(enum.StrEnum):
    """Why a lease was not renewed."""

    LEASE_NOT_FOUND = "lease_not_found"
    NOT_CONNECTED = "not_connected"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Leading blocks that are ready, and the lease over exactly these.

    Without a hit `lease_id` and `lease_deadline_s` are None. `reason` is set
    when there was no answer of the daemon: a miss, too, to be counted apart.
    The lease's deadline is reckoned from the request's departure, so the
    daemon's own is never earlier. `lease_id` is opaque and any size; it fits
    this daemon's life alone.
    """

    hit_blocks: int = 0
    lease_id: int | None = None
    lease_deadline_s: float | None = None
    reason: Reason | None = None


class PendingLookup:
    """A lookup under way: poll `result`. Belongs to the scheduler's thread.

    `result` is written once, by the session. Who loses interest before using
    the result calls `abandon` and forgets the object: a lease that was or will
    be granted is then released by the session.
    """

    __slots__ = ("_on_abandon", "result")

    def __init__(self, on_abandon: Callable[[PendingLookup], None]) -> None:
        self.result: LookupResult | None = None
        self._on_abandon = on_abandon

    def abandon(self) -> None:
        """Give the lease back, whether it is here already or comes later."""
        self._on_abandon(self)


class PendingRenewal:
    """A renewal under way: poll. The old deadline holds until `lease_deadline_s` is there."""

    __slots__ = ("failed", "lease_deadline_s")

    def __init__(self) -> None:
        self.lease_deadline_s: float | None = None
        self.failed: RenewFailed | None = None


class SchedulerPort(Protocol):
    """A scheduler's way to the daemon. Belongs to the scheduler's thread and never waits.

    `reset` and `close` are the exceptions: they may wait, within their bounds.
    """

    @property
    def state(self) -> SessionState:
        """Where the session stands; a plain read that may be outdated at once."""

    @property
    def limits(self) -> Limits | None:
        """The daemon's limits; None before the first welcome, kept while it is lost."""

    @property
    def accepting(self) -> bool:
        """Whether lookups may be asked and stores decided: up, and no reset is owed."""

    @property
    def instance_complete(self) -> bool:
        """Whether all ranks have registered, as of the last heartbeat. Stores before are vain."""

    @property
    def generation(self) -> int | None:
        """The namespace's generation as last heard; None unless `accepting`."""

    def start_lookup(
        self, generation: int, group: int, block_hashes: tuple[bytes, ...]
    ) -> PendingLookup:
        """Ask for the prefix hit of consecutive blocks; the hashes are equally long.

        Takes microseconds. The result comes in any case: after a lost
        connection or the session's own time limit with a `reason`. More than
        `lookup_blocks_max` hashes are cut to that many, or to `load_blocks_max` where that is less.
        """

    def renew(self, lease_id: int) -> PendingRenewal:
        """Ask for a later deadline of a lease."""

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back. Not connected to their daemon: nothing to do, they expire."""

    def reset(self, timeout_s: float = 1.0) -> bool:
        """Make all that is stored in the namespace unreachable; True when confirmed.

        The one call that waits, at most `timeout_s` in all. Unconfirmed, the
        reset is owed: `accepting` is False until the session has made good for it.
        """

    def close(self, timeout_s: float = 1.0) -> None:
        """Say goodbye within the bound. Never raises, may be called twice."""

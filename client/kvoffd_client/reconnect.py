"""When to try again, and what a failure means. Pure but for the clock and the dice passed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd_client.errors import (
    ClientError,
    DaemonAbsent,
    DaemonUnreachable,
    Refused,
    SessionClosed,
)
from kvoffd_client.ports import SessionState

if TYPE_CHECKING:
    import grpc.aio

    from kvoffd_client.descriptions import SessionOptions

# A session that was up for less than this did not work: its back-off goes on growing.
_STABLE_S = 5.0
# "Already there" may be our own former session that the daemon has not yet let go.
_CURABLE_REFUSALS_MAX = 12

# It says so itself: there will be another daemon, or another session, in a moment.
_PASSING = frozenset({"DRAINING", "DEAD"})
_CURABLE_STATUS = frozenset({"ALREADY_EXISTS", "ABORTED", "RESOURCE_EXHAUSTED"})
_REFUSAL_STATUS = frozenset(
    {
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "PERMISSION_DENIED",
        "UNIMPLEMENTED",
        "OUT_OF_RANGE",
        "NOT_FOUND",
    }
)


class Backoff:
    """How long to pause after a failure: exponential, with full jitter."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._tries = 0
        self._refusals = 0
        self._up_since_s = 0.0

    def went_up(self) -> None:
        self._up_since_s = self._options.clock()
        self._refusals = 0

    def failed(self, failure: ClientError, *, was_up: bool) -> tuple[bool, float]:
        """Whether it counts as refused, and the pause."""
        options = self._options
        if was_up and options.clock() - self._up_since_s >= _STABLE_S:
            self._tries = 0
        if isinstance(failure, Refused) and failure.code not in _PASSING:
            self._refusals += 1
            if not failure.curable or self._refusals > _CURABLE_REFUSALS_MAX:
                # A little jitter here, too, but a long while in any case.
                return True, options.refused_retry_s * (0.5 + options.jitter() / 2)
        absent = isinstance(failure, DaemonAbsent)
        max_s = options.backoff_absent_max_s if absent else options.backoff_max_s
        bound_s = min(max_s, options.backoff_first_s * 2.0 ** min(self._tries, 30))
        self._tries += 1
        # Full jitter, but for a floor: a pause of nothing would be no back-off at all.
        return False, max(bound_s * options.jitter(), options.backoff_first_s / 5)


def explain(error: grpc.aio.AioRpcError, *, refusals: bool = False) -> ClientError:
    """A call's failure as ours. Only at registration is a status a refusal for good."""
    code = error.code().name
    details = error.details() or "no details"
    if code == "UNAVAILABLE":
        return DaemonUnreachable(f"the daemon went away: {details}")
    if code == "DEADLINE_EXCEEDED":
        return SessionClosed("the daemon did not answer in time")
    if refusals and code in _REFUSAL_STATUS | _CURABLE_STATUS:
        return Refused(code, details, curable=code in _CURABLE_STATUS)
    return SessionClosed(f"the daemon ended the call: {details} ({code})")


def judge(socket_path: str, *, refused: bool, was_ever_up: bool) -> tuple[SessionState, str]:
    """A failure's state, and what is said of it."""
    if refused:
        return SessionState.REFUSED, (
            f"the daemon at {socket_path} refuses this engine, which goes on without it"
        )
    if was_ever_up:
        return SessionState.LOST, (
            f"lost the daemon at {socket_path}, requests recompute until it is back"
        )
    return SessionState.ABSENT, "requests recompute until the daemon is there"

"""What a copier is told when it is made, and what it tells the service.

Types only; used on the loop thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvoffd.copier.frames import BatchEnd


@dataclass(frozen=True, slots=True)
class CopierOptions:
    """Times and limits of a copier."""

    #: From spawn to Hello: an interpreter's start on a busy machine.
    start_timeout_s: float = 30.0
    #: From hanging up to SIGKILL.
    stop_timeout_s: float = 5.0
    ping_interval_s: float = 1.0
    #: An idle copier that does not answer for so long is killed.
    ping_timeout_s: float = 10.0
    #: Pause before the first restart; doubles with each quick failure.
    restart_pause_s: float = 0.05
    restart_pause_max_s: float = 10.0
    #: A life shorter than this is a quick failure.
    quick_failure_s: float = 10.0
    #: From so many quick failures in a row on, the state is "down" between the tries.
    quick_failures_max: int = 5
    #: Beyond it a batch fails at once: a bound on our memory for a stuck copier.
    batches_in_flight_max: int = 65536
    #: Added to the copier's environment, which is otherwise ours.
    environment: Mapping[str, str] = field(default_factory=dict)


class CopierEvents(Protocol):
    """What a copier tells the service. Called on the loop, one after the other."""

    def batch_ended(self, end: BatchEnd) -> None:
        """The one end of a batch."""

    def copier_up(self, incarnation: int, pidfd: int) -> None:
        """A process has started and has opened all pools; no batch has been sent to it yet.

        Dup the pidfd to keep it: it is closed at the process's death.
        """

    def copier_died(self, incarnation: int, reason: str) -> None:
        """The process is gone, and so are its mappings. Its batches end after this call.

        Not called for a process that stop() ended.
        """

"""What a scheduler's thread puts before the background loop, one value a request.

Plain values; a pending object in them is written by the loop alone, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffd_client.ports import PendingLookup, PendingRenewal
    from kvoffd_client.resets import ResetWaiter


@dataclass(frozen=True, slots=True)
class LookupAsked:
    """A prefix to look for."""

    pending: PendingLookup
    generation: int
    group: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LookupAbandoned:
    """Nobody will use the result; its lease goes back."""

    pending: PendingLookup


@dataclass(frozen=True, slots=True)
class RenewAsked:
    """A lease to prolong."""

    pending: PendingRenewal
    lease_id: int


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """Leases to give back."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResetAsked:
    """A reset that somebody waits for."""

    waiter: ResetWaiter


Request = LookupAsked | LookupAbandoned | RenewAsked | ReleaseAsked | ResetAsked


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A message that awaits its reply. The loop's."""

    pending: PendingLookup | PendingRenewal
    asked_s: float

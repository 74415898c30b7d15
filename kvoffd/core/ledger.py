"""Ledgers: the law of conservation, instance by instance.

submitted = stored + present + rejected + failed + in flight, in blocks, counted once
for each rank that has begun the job. Owned by Stores, on the loop thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvoffd.core.types import InstanceKey, UnstoredReason


class Kept(enum.Enum):
    """The good verdicts on a block of a job."""

    STORED = "stored"
    PRESENT = "present"


if TYPE_CHECKING:
    Verdict = Kept | UnstoredReason


@dataclass(frozen=True, slots=True)
class Ledger:
    """Blocks times ranks. Reasons that never occurred are not listed."""

    submitted: int = 0
    stored: int = 0
    present: int = 0
    in_flight: int = 0
    unstored: tuple[tuple[UnstoredReason, int], ...] = ()

    @property
    def rejected(self) -> int:
        """Blocks that the daemon chose not to store."""
        return sum(blocks for reason, blocks in self.unstored if reason.is_rejection)

    @property
    def failed(self) -> int:
        """Blocks that it tried to store in vain."""
        return sum(blocks for reason, blocks in self.unstored if not reason.is_rejection)

    @property
    def is_conserved(self) -> bool:
        """The law itself."""
        decided = self.stored + self.present + self.rejected + self.failed
        return self.submitted == decided + self.in_flight


class _Account:
    """One instance's counts, or those of all that are gone."""

    __slots__ = ("decided", "in_flight", "submitted")

    def __init__(self) -> None:
        self.submitted = 0
        self.in_flight = 0
        self.decided: dict[Verdict, int] = {}

    def add(self, verdict: Verdict, blocks: int) -> None:
        self.decided[verdict] = self.decided.get(verdict, 0) + blocks

    def merge(self, other: _Account) -> None:
        self.submitted += other.submitted
        self.in_flight += other.in_flight
        for verdict, blocks in other.decided.items():
            self.add(verdict, blocks)

    def ledger(self) -> Ledger:
        return Ledger(
            submitted=self.submitted,
            stored=self.decided.get(Kept.STORED, 0),
            present=self.decided.get(Kept.PRESENT, 0),
            in_flight=self.in_flight,
            unstored=unstored_counts(self.decided),
        )


class Ledgers:
    """The accounts of the living instances, and the sum of the others."""

    def __init__(self) -> None:
        self._accounts: dict[InstanceKey, _Account] = {}
        self._gone = _Account()

    def submit(self, instance: InstanceKey, blocks: int) -> None:
        """A rank has begun a job of so many blocks; all of them are in flight."""
        account = self._accounts.get(instance)
        if account is None:
            account = self._accounts[instance] = _Account()
        account.submitted += blocks
        account.in_flight += blocks

    def decide(self, instance: InstanceKey, verdict: Verdict, blocks: int) -> None:
        """So many blocks in flight have their verdict."""
        account = self._accounts[instance]
        account.in_flight -= blocks
        account.add(verdict, blocks)

    def drop(self, instance: InstanceKey) -> None:
        """The instance is gone; its counts go into the total."""
        account = self._accounts.pop(instance, None)
        if account is not None:
            self._gone.merge(account)

    def instances(self) -> tuple[InstanceKey, ...]:
        """Those with an account."""
        return tuple(self._accounts)

    def ledger(self, instance: InstanceKey) -> Ledger:
        """All zero for an instance that is unknown, or gone."""
        account = self._accounts.get(instance)
        return account.ledger() if account is not None else Ledger()

    def total(self) -> Ledger:
        """Of all instances since the start, the gone ones among them."""
        total = _Account()
        total.merge(self._gone)
        for account in self._accounts.values():
            total.merge(account)
        return total.ledger()


def unstored_counts(tally: Mapping[Verdict, int]) -> tuple[tuple[UnstoredReason, int], ...]:
    """The bad verdicts of a tally."""
    return tuple(
        (verdict, blocks)
        for verdict, blocks in tally.items()
        if not isinstance(verdict, Kept) and blocks
    )

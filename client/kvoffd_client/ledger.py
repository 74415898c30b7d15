"""The conservation law of stores, in blocks.

Owned by whoever made it, on one thread. Knows nothing of sessions: it is told
of jobs and of their ends. submitted = stored + present + rejected(reason) +
failed(reason) + in flight, at every moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvoffd_client.ports import ReasonCount, StoreResult


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """A reading of a ledger; all figures are blocks, but for the last two, which are results."""

    submitted: int = 0
    stored: int = 0
    present: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    in_flight: int = 0
    results_unexpected: int = 0
    results_malformed: int = 0


class Ledger:
    """Accounts for each job from submission to its one end, by job id."""

    def __init__(self) -> None:
        self._open_jobs: dict[int, int] = {}
        self._submitted = 0
        self._stored = 0
        self._present = 0
        self._in_flight = 0
        self._rejected: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._unexpected = 0
        self._malformed = 0

    def submit(self, job_id: int, blocks: int) -> None:
        """Open a job. An id that is open already is a bug of the caller."""
        assert blocks > 0, "a job without blocks"
        assert job_id not in self._open_jobs, f"job {job_id} was submitted twice"
        self._open_jobs[job_id] = blocks
        self._submitted += blocks
        self._in_flight += blocks

    def settle(self, result: StoreResult) -> bool:
        """Close a job by its result; False when no such job is open (counted, nothing else).

        A result whose blocks do not add up to the job's fails all of them as
        `malformed`: better a block too few called stored than one too many.
        """
        blocks = self._open_jobs.pop(result.job_id, None)
        if blocks is None:
            self._unexpected += 1
            return False
        self._in_flight -= blocks
        if not _adds_up(result, blocks):
            self._malformed += 1
            self._failed["malformed"] += blocks
            return True
        self._stored += result.stored
        self._present += result.present
        _add(self._rejected, result.rejected)
        _add(self._failed, result.failed)
        return True

    def reject(self, job_id: int, reason: str) -> bool:
        """Close a whole job as rejected."""
        return self._close_whole(job_id, self._rejected, reason)

    def fail(self, job_id: int, reason: str) -> bool:
        """Close a whole job as failed."""
        return self._close_whole(job_id, self._failed, reason)

    def _close_whole(self, job_id: int, counts: Counter[str], reason: str) -> bool:
        blocks = self._open_jobs.pop(job_id, None)
        if blocks is None:
            self._unexpected += 1
            return False
        self._in_flight -= blocks
        counts[reason] += blocks
        return True

    def is_open(self, job_id: int) -> bool:
        return job_id in self._open_jobs

    def totals(self) -> LedgerTotals:
        """A reading; does not change with the ledger."""
        return LedgerTotals(
            submitted=self._submitted,
            stored=self._stored,
            present=self._present,
            rejected=dict(self._rejected),
            failed=dict(self._failed),
            in_flight=self._in_flight,
            results_unexpected=self._unexpected,
            results_malformed=self._malformed,
        )

    def assert_balanced(self) -> None:
        """Raise AssertionError with the figures when the law does not hold."""
        open_blocks = sum(self._open_jobs.values())
        ended = self._stored + self._present + self._rejected.total() + self._failed.total()
        assert self._in_flight == open_blocks, f"{self.totals()}, but {open_blocks} are open"
        assert self._submitted == ended + self._in_flight, f"does not balance: {self.totals()}"


def _add(counts: Counter[str], reasons: tuple[ReasonCount, ...]) -> None:
    for entry in reasons:
        counts[str(entry.reason)] += entry.blocks


def _adds_up(result: StoreResult, blocks: int) -> bool:
    unstored = [entry.blocks for entry in (*result.rejected, *result.failed)]
    figures = [result.stored, result.present, *unstored]
    return min(figures) >= 0 and sum(figures) == blocks

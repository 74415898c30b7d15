"""Streams: the outcomes on their way to one rank, within one epoch of its session.

A RankStream is owned by the service, which posts to it, and read by exactly one writer
task of the rim. Runs on the loop thread; posting never blocks. Outcomes that are posted
to a stream that has ended are dropped: its client has failed those jobs already.
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvoffd.core.types import UnstoredReason


class StoreOutcome(NamedTuple):
    """How one store job ended on one rank, in blocks."""

    job_id: int
    stored: int
    present: int
    unstored: tuple[tuple[UnstoredReason, int], ...]


class LoadStatus(enum.Enum):
    """How a load ended."""

    LOADED = "loaded"
    LEASE_NOT_FOUND = "lease_not_found"
    STALE_GENERATION = "stale_generation"
    REVOKED = "revoked"
    COPIER = "copier"
    DEADLINE = "deadline"
    DRAINING = "draining"
    OVERLOADED = "overloaded"


class LoadOutcome(NamedTuple):
    """How one load job ended on one rank."""

    job_id: int
    status: LoadStatus


class Outcomes(NamedTuple):
    """All outcomes that were there when the writer came for them."""

    stores: list[StoreOutcome]
    loads: list[LoadOutcome]


class RankStream:
    """One epoch of one rank."""

    __slots__ = ("_loads", "_stores", "_wake", "close_reason", "epoch", "goodbye", "jobs_in_flight")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        #: Jobs that came by this stream and have no outcome yet.
        self.jobs_in_flight = 0
        #: The client sends no more steps and waits for the outcomes of those it sent.
        self.goodbye = False
        self.close_reason: str | None = None
        self._stores: list[StoreOutcome] = []
        self._loads: list[LoadOutcome] = []
        self._wake = asyncio.Event()

    @property
    def outcomes_waiting(self) -> int:
        """Outcomes that the writer has not taken."""
        return len(self._stores) + len(self._loads)

    def post_store(self, outcome: StoreOutcome) -> None:
        self.jobs_in_flight -= 1
        if self.close_reason is None:
            self._stores.append(outcome)
            self._wake.set()

    def post_load(self, outcome: LoadOutcome) -> None:
        self.jobs_in_flight -= 1
        if self.close_reason is None:
            self._loads.append(outcome)
            self._wake.set()

    def say_goodbye(self) -> None:
        """No further step will come; the stream ends when its jobs have."""
        self.goodbye = True
        self._wake.set()

    def close(self, reason: str) -> None:
        """End the stream; the first reason counts."""
        if self.close_reason is None:
            self.close_reason = reason
            self._wake.set()

    async def take(self) -> Outcomes | None:
        """All outcomes there are, as soon as there are any; None at the stream's end."""
        while True:
            if self.outcomes_waiting:
                outcomes = Outcomes(self._stores, self._loads)
                self._stores, self._loads = [], []
                return outcomes
            if self.close_reason is not None:
                return None
            if self.goodbye and self.jobs_in_flight == 0:
                self.close("All jobs of the stream have ended.")
                return None
            self._wake.clear()
            await self._wake.wait()

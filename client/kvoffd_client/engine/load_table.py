"""Loads of one rank from hand-over to their proven end.

Owned by the rank half, on the rank's thread. Never waits. The ticket page is
the only proof: what the daemon says of a load merely makes us look.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffd_client.engine.metadata import LoadEnd, LoadOrder
from kvoffd_client.ports import LoadResult, LoadWork, RankPort, Reason
from kvoffd_client.tickets import LoadProof, TicketPage

if TYPE_CHECKING:
    from collections.abc import Callable

NO_TICKET = "no_ticket"
DOOMED = "doomed"
OFF = "off"
NO_LEASE = "no_lease"
SHUTDOWN = "shutdown"


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    ticket_cell: int
    deadline_s: float
    #: Why it must end; None while it may still end well.
    ending: str | None = None


class LoadTable:
    """Loads by job id, and what of them has ended but was not taken yet."""

    def __init__(
        self,
        port: RankPort,
        tickets: TicketPage,
        rank: int,
        load_deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._port = port
        self._tickets = tickets
        self._rank = rank
        self._deadline_s = load_deadline_s
        self._clock = clock
        self._loads: dict[int, _Load] = {}
        self._ends: list[LoadEnd] = []
        self._ended_requests: list[str] = []
        self._failed_blocks: list[int] = []
        self.begun = 0
        self.failed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def has_ended(self) -> bool:
        return bool(self._ended_requests)

    @property
    def unproven(self) -> int:
        """Loads that were told to end and may still be written to."""
        return sum(load.ending is not None for load in self._loads.values())

    def begin(self, order: LoadOrder) -> LoadWork | None:
        """The work to hand over; None when the load ends here and now, as failed."""
        self.begun += 1
        if order.lease_id is None:
            self._end(order, NO_LEASE)
            return None
        cell = self._tickets.allocate(order.job_id)
        if cell is None:
            self._end(order, NO_TICKET)
            return None
        deadline_s = self._clock() + self._deadline_s
        self._loads[order.job_id] = _Load(order, cell, deadline_s)
        return LoadWork(
            order.job_id,
            order.generation,
            cell,
            # Everything up to the end of the last step has let go of the destinations.
            self._tickets.bell,
            order.lease_id,
            order.skip_blocks,
            order.block_ids,
            deadline_s,
        )

    def refuse(self, order: LoadOrder, reason: str) -> None:
        """End a load that was never begun."""
        self.begun += 1
        self._end(order, reason)

    def doom(self, job_id: int, reason: str = DOOMED) -> None:
        """The load is to end as failed whatever comes; unknown ones have ended already."""
        load = self._loads.get(job_id)
        if load is not None:
            load.ending = reason

    def doom_all(self, reason: str) -> None:
        for job_id in self._loads:
            self.doom(job_id, reason)

    def hear(self, result: LoadResult) -> None:
        """Take the daemon's, or the session's, word for a load."""
        load = self._loads.get(result.job_id)
        if load is None or load.ending is not None:
            return
        if result.reason is not None:
            load.ending = str(result.reason)
        elif self._tickets.is_loaded(load.ticket_cell, result.job_id):
            self._close(load, None)
        else:
            load.ending = Reason.PROTOCOL

    def work(self) -> None:
        """Look at what must end, by word, by doom or by its deadline. Call each step."""
        if not self._loads:
            return
        now_s = self._clock()
        for load in list(self._loads.values()):
            if load.ending is None and now_s >= load.deadline_s:
                load.ending = Reason.DEADLINE
            if load.ending is not None:
                self._try_end(load, load.ending)

    def take_ends(self) -> tuple[LoadEnd, ...]:
        ends, self._ends = tuple(self._ends), []
        return ends

    def take_requests(self) -> tuple[list[str], list[int]]:
        """Requests whose load has ended, each once, and the blocks of those that failed."""
        requests, self._ended_requests = self._ended_requests, []
        blocks, self._failed_blocks = self._failed_blocks, []
        return requests, blocks

    def _try_end(self, load: _Load, reason: str) -> None:
        cell = load.ticket_cell
        proof = self._tickets.try_end_load(cell)
        if not proof.is_final:
            gone = proof is LoadProof.INTERRUPTED and self._port.copier_gone(
                cell, self._tickets.incarnation(cell)
            )
            if not gone:
                return
        loaded = proof is LoadProof.LOADED and reason not in _FAILED_WHATEVER_CAME
        self._close(load, None if loaded else reason)

    def _close(self, load: _Load, reason: str | None) -> None:
        del self._loads[load.order.job_id]
        self._tickets.free(load.ticket_cell)
        self._end(load.order, reason)

    def _end(self, order: LoadOrder, reason: str | None) -> None:
        self._ends.append(LoadEnd(self._rank, order.job_id, reason))
        self._ended_requests.append(order.request_id)
        if reason is not None:
            self.failed[reason] += 1
            self._failed_blocks += order.block_ids


# Bytes that came all the same are not to be used: they are of before a reset, of nobody's
# request any more, or nobody has the right to read on.
_FAILED_WHATEVER_CAME = frozenset({DOOMED, OFF, Reason.STALE_GENERATION, Reason.GENERATION_MOVED})

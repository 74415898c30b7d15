"""Lookups of waiting requests: one under way for each, and its answer until it is used.

Owned by the scheduler half, on the scheduler's thread. Never waits. Knows
nothing of blocks in the engine's pool: it deals in tokens and hashes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd_client.engine.types import RequestView, SchedulerOptions
    from kvoffd_client.ports import LookupResult, PendingLookup, PendingRenewal, SchedulerPort

# A request whose local prefix keeps shrinking while it waits asks anew each time; a few
# times is life, more is a scheduler that will not admit it soon.
TRIES_MAX = 8


@dataclass(slots=True)
class _Search:
    """One request's lookup: under way, or answered."""

    asked_at_s: float
    asked_from_tokens: int
    generation: int
    tries: int = 1
    spent_s: float = 0.0
    pending: PendingLookup | None = None
    end_tokens: int = 0
    lease_id: int | None = None
    lease_deadline_s: float = 0.0
    renewal: PendingRenewal | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """The part of a lookup's answer that a load needs."""

    lease_id: int
    skip_blocks: int
    generation: int


class Lookups:
    """All searches, by request id."""

    def __init__(
        self,
        port: SchedulerPort,
        block_tokens: int,
        options: SchedulerOptions,
        clock: Callable[[], float],
    ) -> None:
        self._port = port
        self._block_tokens = block_tokens
        self._options = options
        self._clock = clock
        self._searches: dict[str, _Search] = {}
        self._leased: dict[str, _Search] = {}
        self.started = 0
        self.hit_blocks = 0
        self.misses: Counter[str] = Counter()

    def ask(self, request: RequestView, computed_tokens: int) -> int | None:
        """Tokens to be had beyond `computed_tokens`; None while nobody knows."""
        request_id = request.request_id
        search = self._searches.get(request_id)
        port = self._port
        generation = port.generation if port.accepting else None
        if generation is None:
            if search is not None:
                self.drop(request_id)
            self.misses["not_connected"] += 1
            return 0
        now_s = self._clock()
        if search is None:
            return self._start(request, computed_tokens, generation, now_s, None)
        if search.pending is not None and not self._poll(request_id, search, now_s):
            return None
        if self._holds(search, computed_tokens, generation, now_s):
            return max(0, search.end_tokens - computed_tokens)
        return self._start(request, computed_tokens, generation, now_s, search)

    def admit(
        self, request_id: str, computed_tokens: int, external_tokens: int
    ) -> Admission | None:
        """End the search by the request's admission; None when there is nothing to load by.

        The lease goes to the load; without external tokens it is given back.
        """
        search = self._searches.get(request_id)
        if search is None:
            return None
        if (
            external_tokens <= 0
            or search.lease_id is None
            or computed_tokens < search.asked_from_tokens
            or computed_tokens + external_tokens > search.end_tokens
        ):
            self.drop(request_id)
            return None
        del self._searches[request_id]
        self._leased.pop(request_id, None)
        skipped = (computed_tokens - search.asked_from_tokens) // self._block_tokens
        return Admission(search.lease_id, skipped, search.generation)

    def drop(self, request_id: str) -> None:
        """Forget a request's search and give back what it was granted."""
        search = self._searches.pop(request_id, None)
        if search is not None:
            self._let_go(request_id, search)

    def drop_all(self) -> None:
        for request_id in list(self._searches):
            self.drop(request_id)

    def renew_leases(self) -> None:
        """Call each step: prolong the leases of requests that still wait. Cheap without any."""
        if not self._leased:
            return
        now_s = self._clock()
        limits = self._port.limits
        ttl_s = limits.lease_ttl_s if limits is not None else 0.0
        for request_id, search in list(self._leased.items()):
            renewal = search.renewal
            if renewal is not None:
                if renewal.lease_deadline_s is not None:
                    search.lease_deadline_s = renewal.lease_deadline_s
                    search.renewal = None
                elif renewal.failed is not None:
                    del self._leased[request_id]
                    search.lease_deadline_s = now_s
            elif search.lease_deadline_s <= now_s:
                # Nobody asked in time; the daemon has let it go, too.
                del self._leased[request_id]
            elif search.lease_deadline_s - now_s < ttl_s / 2 and search.lease_id is not None:
                search.renewal = self._port.renew(search.lease_id)

    def _start(
        self,
        request: RequestView,
        computed_tokens: int,
        generation: int,
        now_s: float,
        former: _Search | None,
    ) -> int | None:
        """Begin a search, the first or one more within the same total time."""
        tries, spent_s = 1, 0.0
        if former is not None:
            self._let_go(request.request_id, former)
            tries, spent_s = former.tries + 1, former.spent_s
        search = _Search(now_s, computed_tokens, generation, tries, spent_s)
        search.end_tokens = computed_tokens
        self._searches[request.request_id] = search
        hashes = self._hashes(request, computed_tokens)
        if not hashes:
            return 0
        if spent_s >= self._options.lookup_deadline_s or tries > TRIES_MAX:
            self.misses["deadline"] += 1
            return 0
        search.pending = self._port.start_lookup(generation, self._options.group, hashes)
        self.started += 1
        return None

    def _hashes(self, request: RequestView, computed_tokens: int) -> tuple[bytes, ...]:
        limits = self._port.limits
        if limits is None:
            return ()
        begin = computed_tokens // self._block_tokens
        count = min(limits.lookup_blocks_max, limits.load_blocks_max)
        end = min(request.tokens_total // self._block_tokens, begin + count)
        return tuple(request.block_hashes[begin:end])

    def _poll(self, request_id: str, search: _Search, now_s: float) -> bool:
        """Whether the search has ended: by its answer, or because its time is up."""
        assert search.pending is not None
        result = search.pending.result
        took_s = now_s - search.asked_at_s
        if result is None and search.spent_s + took_s < self._options.lookup_deadline_s:
            return False
        search.spent_s += took_s
        if result is None:
            search.pending.abandon()
            self.misses["deadline"] += 1
        else:
            self._answer(request_id, search, result)
        search.pending = None
        return True

    def _answer(self, request_id: str, search: _Search, result: LookupResult) -> None:
        if result.lease_id is None or result.lease_deadline_s is None or result.hit_blocks <= 0:
            self.misses[str(result.reason or "absent")] += 1
            return
        self.hit_blocks += result.hit_blocks
        search.lease_id = result.lease_id
        search.lease_deadline_s = result.lease_deadline_s
        search.end_tokens = search.asked_from_tokens + result.hit_blocks * self._block_tokens
        self._leased[request_id] = search

    def _holds(self, search: _Search, computed_tokens: int, generation: int, now_s: float) -> bool:
        """Whether an answer may still be used. A miss holds as a hit does, without a lease."""
        if generation != search.generation or computed_tokens < search.asked_from_tokens:
            return False
        if search.lease_id is None:
            return True
        limits = self._port.limits
        margin_s = self._options.lease_margin_s
        if limits is not None:
            # A daemon with short leases must not make every answer useless.
            margin_s = min(margin_s, limits.lease_ttl_s / 4)
        return search.lease_deadline_s - now_s > margin_s

    def _let_go(self, request_id: str, search: _Search) -> None:
        self._leased.pop(request_id, None)
        if search.pending is not None:
            search.pending.abandon()
            search.pending = None
        if search.lease_id is not None:
            self._port.release((search.lease_id,))
            search.lease_id = None

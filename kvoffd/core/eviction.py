"""Eviction: which blocks go when a block needs slots and none are free.

Owns no state. Called by Blocks on the loop thread. It takes the chosen blocks out of
the index, and puts all of them back when they would not make enough room: so a block
that finds no room has changed nothing. It frees no slot; its caller does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.entry import BlockState
from kvoffd.core.turn import ReclaimSearch

if TYPE_CHECKING:
    from collections.abc import Container

    from kvoffd.core.allocator import Allocator, Extent
    from kvoffd.core.entry import BlockEntry
    from kvoffd.core.index import Index
    from kvoffd.core.policy.base import Policy
    from kvoffd.core.turn import Turn

# Each try may read all slots of an extent. Fewer, and one held block in each of the
# coldest extents keeps the other models out; more, and a store that finds no room
# stalls lookups behind it.
RECLAIM_TRIES_MAX = 16


class Eviction:
    """Chooses victims: leaves of the own slot size, or a whole extent of another."""

    def __init__(self, index: Index, allocator: Allocator, policy: Policy) -> None:
        self._index = index
        self._allocator = allocator
        self._policy = policy

    def make_room(self, turn: Turn, slot_bytes: int, slots: int) -> list[BlockEntry] | None:
        """Blocks to free, by then out of the index, so that the slots are to be had.

        None when there is no such set; nothing is changed then.
        """
        victims: dict[BlockEntry, None] = {}
        short = slots - self._allocator.available(slot_bytes)
        while short > 0:
            own = self._policy.coldest(slot_bytes)
            chosen = self._extent_victims(turn, slot_bytes, own, victims)
            if chosen:
                short -= self._allocator.slots_per_extent(slot_bytes)
            elif own is not None:
                chosen = [own]
                short -= len(own.slots)
            else:
                for entry in reversed(victims):
                    self._index.link(entry)
                return None
            for entry in chosen:
                self._index.unlink(entry)
                victims[entry] = None
        return list(victims)

    def _extent_victims(
        self, turn: Turn, slot_bytes: int, own: BlockEntry | None, chosen: Container[BlockEntry]
    ) -> list[BlockEntry]:
        """All that has to go for one extent of another class; empty when none may go."""
        if self._allocator.classes_used == int(self._allocator.has_class(slot_bytes)):
            return []
        search = turn.searches.get(slot_bytes)
        if search is None:
            search = ReclaimSearch(self._allocator.foreign_extents(slot_bytes))
            turn.searches[slot_bytes] = search
        limit = None if own is None else self._policy.recency(own)
        while search.position < len(search.extents) and search.tries < RECLAIM_TRIES_MAX:
            extent = search.extents[search.position]
            if limit is not None and extent.recency >= limit:
                return []
            search.position += 1
            if extent.slot_bytes in {0, slot_bytes}:
                continue
            search.tries += 1
            victims = self._sweep(extent, limit, chosen)
            if victims:
                return victims
        return []

    def _sweep(
        self, extent: Extent, limit: int | None, chosen: Container[BlockEntry]
    ) -> list[BlockEntry]:
        """The extent's blocks and all their descendants, if every one of them may go."""
        found: dict[BlockEntry, None] = {}
        stack = list(extent.used.values())
        while stack:
            entry = stack.pop()
            if entry in found or entry in chosen:
                continue
            if not entry.linked or entry.holds or entry.state is not BlockState.READY:
                return []
            if limit is not None and self._policy.recency(entry) >= limit:
                return []
            found[entry] = None
            stack.extend(self._index.children(entry.key))
        return list(found)

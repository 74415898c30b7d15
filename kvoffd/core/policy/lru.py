"""Least recently used first.

Owns the recency of every ready block and, for each slot size, a heap of the blocks
that may go. An entry of a heap is not searched for when its block is touched, held
or gone: it is stale, and dropped when it comes to the top.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvoffd.core.entry import BlockEntry

# Stale entries of a heap may outnumber live ones by this many before the heap is made
# anew. Smaller, and a cache of few blocks would do little else.
STALE_HEAP_SLACK = 256


class LruPolicy:
    """Implements kvoffd.core.policy.base.Policy."""

    def __init__(self) -> None:
        self._touches = 0
        self._recency: dict[BlockEntry, int] = {}
        self._evictable: dict[int, set[BlockEntry]] = {}
        self._heaps: dict[int, list[tuple[int, BlockEntry]]] = {}

    def touch(self, entry: BlockEntry) -> int:
        self._touches += 1
        self._recency[entry] = self._touches
        if entry in self._evictable.get(entry.slot_bytes, ()):
            self._push(entry)
        return self._touches

    def recency(self, entry: BlockEntry) -> int:
        return self._recency[entry]

    def add(self, entry: BlockEntry) -> None:
        members = self._evictable.setdefault(entry.slot_bytes, set())
        assert entry not in members, f"{entry} is evictable already"
        members.add(entry)
        self._push(entry)

    def remove(self, entry: BlockEntry) -> None:
        members = self._evictable[entry.slot_bytes]
        members.remove(entry)
        if not members:
            del self._evictable[entry.slot_bytes]
            self._heaps.pop(entry.slot_bytes, None)

    def forget(self, entry: BlockEntry) -> None:
        assert entry not in self._evictable.get(entry.slot_bytes, ()), f"{entry} is evictable"
        del self._recency[entry]

    def coldest(self, slot_bytes: int) -> BlockEntry | None:
        members = self._evictable.get(slot_bytes)
        if members is None:
            return None
        heap = self._heaps[slot_bytes]
        while True:
            recency, entry = heap[0]
            if entry in members and self._recency[entry] == recency:
                return entry
            heapq.heappop(heap)

    def evictable(self) -> Collection[BlockEntry]:
        return [entry for members in self._evictable.values() for entry in members]

    def known(self) -> Collection[BlockEntry]:
        return self._recency.keys()

    def _push(self, entry: BlockEntry) -> None:
        # Two entries of a heap with one recency are of one block, and compare as equal.
        heap = self._heaps.setdefault(entry.slot_bytes, [])
        heapq.heappush(heap, (self._recency[entry], entry))
        members = self._evictable[entry.slot_bytes]
        if len(heap) > 2 * len(members) + STALE_HEAP_SLACK:
            fresh = [(self._recency[member], member) for member in members]
            heapq.heapify(fresh)
            self._heaps[entry.slot_bytes] = fresh

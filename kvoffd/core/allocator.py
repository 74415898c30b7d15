"""Allocator: slots of several sizes out of extents of one size.

Owns which slot is in use by which entry, and the size class of every extent. Called by
Blocks and Eviction on the loop thread. Knows nothing of keys, holds or policies.

An extent takes a class when a slot of it is first needed, and gives it back when the
last of its slots is free. A slot id says extent and index only, so it names the same
cell of the slot table whatever the class is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.types import SlotId

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvoffd.core.entry import BlockEntry


class Extent:
    """One extent. slot_bytes is 0 while it has no class."""

    __slots__ = ("free", "fresh", "index", "recency", "slot_bytes", "slots_total", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.slot_bytes = 0
        self.slots_total = 0
        self.used: dict[SlotId, BlockEntry] = {}
        #: Indexes given back; those from `fresh` on were never given out in this class.
        self.free: list[int] = []
        self.fresh = 0
        #: At least that of the hottest block that has a slot here. It may be too high
        #: after that block has gone; then the extent is spared longer than it must be.
        self.recency = 0

    @property
    def slots_free(self) -> int:
        """Free slots of an extent that has a class."""
        return self.slots_total - len(self.used)


class Allocator:
    """Hands out slots, all or none."""

    def __init__(self, extents_total: int, extent_bytes: int, slot_align_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._stride = extent_bytes // slot_align_bytes
        self._extents = [Extent(index) for index in range(extents_total)]
        # Taken from the end: what was used before is already populated and page-locked.
        self._unused = list(reversed(self._extents))
        self._rooms: dict[int, dict[int, Extent]] = {}
        self._free: dict[int, int] = {}
        self._extents_by_class: dict[int, int] = {}
        self._slots_used = 0
        self._bytes_used = 0
        self._classes_changed: dict[int, int] = {}

    @property
    def slots_used(self) -> int:
        """Slots in use, quarantined ones among them."""
        return self._slots_used

    @property
    def bytes_used(self) -> int:
        """Bytes of whole slots in use."""
        return self._bytes_used

    @property
    def extents_used(self) -> int:
        """Extents that have a class."""
        return len(self._extents) - len(self._unused)

    @property
    def classes_used(self) -> int:
        """Slot sizes that have an extent."""
        return len(self._free)

    def has_class(self, slot_bytes: int) -> bool:
        """True if some extent is of this class."""
        return slot_bytes in self._free

    def extents(self) -> Iterator[Extent]:
        """All of them; to be read only."""
        return iter(self._extents)

    def free_by_class(self) -> Mapping[int, int]:
        """Free slots in the extents of each class."""
        return dict(self._free)

    def slot_offset_bytes(self, slot: SlotId) -> int:
        """Where a slot in use begins in the data."""
        extent = self._extents[slot // self._stride]
        assert slot in extent.used, f"slot {slot} is not in use"
        return extent.index * self._extent_bytes + slot % self._stride * extent.slot_bytes

    def slots_per_extent(self, slot_bytes: int) -> int:
        """What one unused extent gives."""
        return self._extent_bytes // slot_bytes

    def available(self, slot_bytes: int) -> int:
        """Slots of this size to be had without an eviction."""
        return self._free.get(slot_bytes, 0) + len(self._unused) * (
            self._extent_bytes // slot_bytes
        )

    def allocate(self, entry: BlockEntry, count: int) -> tuple[SlotId, ...]:
        """Take slots for an entry. The caller has made sure that they are available."""
        slot_bytes = entry.slot_bytes
        slots: list[SlotId] = []
        while len(slots) < count:
            rooms = self._rooms.get(slot_bytes)
            # The oldest extent with room is filled first, so that others may run empty.
            extent = next(iter(rooms.values())) if rooms else self._claim(slot_bytes)
            room = min(count - len(slots), extent.slots_free)
            slots.extend(self._take(extent, entry) for _ in range(room))
            if len(extent.used) == extent.slots_total:
                del self._rooms[slot_bytes][extent.index]
        self._free[slot_bytes] -= count
        self._slots_used += count
        self._bytes_used += count * slot_bytes
        return tuple(slots)

    def free(self, slot: SlotId) -> None:
        """Give one slot back."""
        extent = self._extents[slot // self._stride]
        assert slot in extent.used, f"slot {slot} is freed twice"
        del extent.used[slot]
        slot_bytes = extent.slot_bytes
        self._slots_used -= 1
        self._bytes_used -= slot_bytes
        self._free[slot_bytes] += 1
        extent.free.append(slot % self._stride)
        self._rooms.setdefault(slot_bytes, {})[extent.index] = extent
        if not extent.used:
            self._unclaim(extent)

    def warm(self, extents: tuple[int, ...], recency: int) -> None:
        """A block with slots in these extents was touched."""
        for index in extents:
            extent = self._extents[index]
            extent.recency = max(extent.recency, recency)

    def extents_of(self, slots: tuple[SlotId, ...]) -> tuple[int, ...]:
        """The extents that slots lie in, each once."""
        first = slots[0] // self._stride
        if all(slot // self._stride == first for slot in slots):
            return (first,)
        return tuple(dict.fromkeys(slot // self._stride for slot in slots))

    def foreign_extents(self, slot_bytes: int) -> list[Extent]:
        """The extents of other classes, coldest first."""
        return sorted(
            (e for e in self._extents if e.slot_bytes not in {0, slot_bytes}),
            key=lambda extent: extent.recency,
        )

    def take_class_changes(self) -> tuple[tuple[int, int], ...]:
        """Extents that changed their class since the last call, and to what (0: none)."""
        changes = tuple(self._classes_changed.items())
        self._classes_changed.clear()
        return changes

    def _take(self, extent: Extent, entry: BlockEntry) -> SlotId:
        if extent.free:
            index = extent.free.pop()
        else:
            index = extent.fresh
            extent.fresh += 1
        slot = SlotId(extent.index * self._stride + index)
        assert slot not in extent.used, f"slot {slot} is allocated twice"
        extent.used[slot] = entry
        return slot

    def _claim(self, slot_bytes: int) -> Extent:
        extent = self._unused.pop()
        extent.slot_bytes = slot_bytes
        extent.slots_total = self.slots_per_extent(slot_bytes)
        extent.recency = 0
        self._rooms.setdefault(slot_bytes, {})[extent.index] = extent
        self._free[slot_bytes] = self._free.get(slot_bytes, 0) + extent.slots_total
        self._extents_by_class[slot_bytes] = self._extents_by_class.get(slot_bytes, 0) + 1
        self._classes_changed[extent.index] = slot_bytes
        return extent

    def _unclaim(self, extent: Extent) -> None:
        rooms = self._rooms[extent.slot_bytes]
        del rooms[extent.index]
        self._free[extent.slot_bytes] -= extent.slots_total
        self._extents_by_class[extent.slot_bytes] -= 1
        if not self._extents_by_class[extent.slot_bytes]:
            del self._extents_by_class[extent.slot_bytes]
            del self._rooms[extent.slot_bytes]
            del self._free[extent.slot_bytes]
        extent.slot_bytes = 0
        extent.slots_total = 0
        extent.free.clear()
        extent.fresh = 0
        self._unused.append(extent)
        self._classes_changed[extent.index] = 0

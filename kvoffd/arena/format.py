"""The arena's tables, byte by byte.

Pure: offsets, record shapes and the fingerprint. docs/decisions/0004-arena-format.md
says why they are so. All words are little-endian and lie at multiples of their size.

    table := header page, namespace table, extent headers (to a page's end), slot records
    data  := extents_total extents of extent_bytes; slot i of an extent begins at
             i * the slot_bytes of that extent's header
    slot record of SlotId s lies at index s; s = extent * slots_per_extent + i
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvoffd.core.types import BlockKey

ARENA_MAGIC = int.from_bytes(b"KVOFARN1", "little")
#: Goes up with any change of what follows. An arena of another version starts empty.
ARENA_VERSION = 1

PAGE_BYTES = 4096
NAMESPACES_MAX = 4096
HASH_BYTES_MAX = 32
DIGEST_BYTES_MAX = 32
NAMESPACE_BYTES = 64
RECORD_BYTES = 128


class SlotState(IntEnum):
    """First word of a slot record. New memory is zero, and so FREE."""

    FREE = 0
    #: Its key is written; its bytes mean nothing yet.
    WRITING = 1
    #: This rank's bytes are complete. The block is, when those of all ranks are.
    READY = 2


#: The magic is written last: a header without it was never finished.
HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("namespaces_max", "<u4"),
        ("data_bytes", "<u8"),
        ("table_bytes", "<u8"),
        ("extent_bytes", "<u8"),
        ("slot_align_bytes", "<u8"),
        ("extents_total", "<u8"),
        ("slots_per_extent", "<u8"),
        ("namespaces_offset_bytes", "<u8"),
        ("extents_offset_bytes", "<u8"),
        ("records_offset_bytes", "<u8"),
    ]
)

#: An entry with ranks_total 0 is unused: ranks_total is written last. The
#: generation is one word, so that a reset is one store.
NAMESPACE = np.dtype(
    [
        ("ranks_total", "<u4"),
        ("digest_length", "<u4"),
        ("generation", "<u8"),
        ("digest", f"V{DIGEST_BYTES_MAX}"),
        ("reserved", "V16"),
    ]
)

#: slot_bytes 0: the extent has no class, and all its records are FREE.
EXTENT = np.dtype([("slot_bytes", "<u8"), ("reserved", "<u8")])

RECORD = np.dtype(
    [
        ("state", "<u4"),
        ("rank", "<u4"),
        ("fingerprint", "<u8"),
        ("namespace", "<u4"),
        ("group", "<u4"),
        ("generation", "<u8"),
        ("sequence", "<u8"),
        ("length_bytes", "<u8"),
        ("checksum", "<u8"),
        ("hash_length", "<u4"),
        ("reserved_word", "<u4"),
        ("hash", f"V{HASH_BYTES_MAX}"),
        ("reserved", "V32"),
    ]
)

assert NAMESPACE.itemsize == NAMESPACE_BYTES, "A namespace entry is one cache line."
assert RECORD.itemsize == RECORD_BYTES, "A slot record is two cache lines."


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Sizes of an arena, and where its tables lie."""

    extents_total: int
    extent_bytes: int
    slot_align_bytes: int

    @property
    def slots_per_extent(self) -> int:
        """Slots of an extent in the smallest class; records are kept for so many."""
        return self.extent_bytes // self.slot_align_bytes

    @property
    def data_bytes(self) -> int:
        return self.extents_total * self.extent_bytes

    @property
    def namespaces_offset_bytes(self) -> int:
        return PAGE_BYTES

    @property
    def extents_offset_bytes(self) -> int:
        return self.namespaces_offset_bytes + NAMESPACES_MAX * NAMESPACE.itemsize

    @property
    def records_offset_bytes(self) -> int:
        end_bytes = self.extents_offset_bytes + self.extents_total * EXTENT.itemsize
        return -(-end_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def table_bytes(self) -> int:
        records = self.extents_total * self.slots_per_extent
        return self.records_offset_bytes + records * RECORD_BYTES


def fingerprint_of(key: BlockKey) -> int:
    """64 bits of a block key, equal in every process that sees the same arena."""
    digest = hashlib.blake2b(
        key.block_hash,
        digest_size=8,
        # The namespace's index is its place in the arena's own namespace table.
        salt=key.namespace.to_bytes(8, "little") + key.group.to_bytes(8, "little"),
    )
    return int.from_bytes(digest.digest(), "little")

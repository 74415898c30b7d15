"""The arena: shared memory for the slots' bytes, and the tables that describe them.

Owns both memfds and the mapping of the tables. The control process, on its
loop thread, is the only writer of the tables. It never maps the data: bytes
are the copiers' business.

Each write leaves the tables in a state that tells the truth to whoever maps
them after this process was killed in the middle: a record's state is written
last when it becomes WRITING or READY, and first when it becomes FREE.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffd.arena import format as layout
from kvoffd.arena.format import ArenaShape, SlotState, fingerprint_of
from kvoffd.arena.room import measure_room
from kvoffd.core.types import BlockKey, NamespaceId, SlotId, SlotRecord
from kvoffd.errors import ArenaFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvoffd.arena.room import Room

#: Kept free beside the arena, for the daemon, its copiers and everybody else.
_RESERVE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """Sizes of an arena."""

    extents_total: int
    extent_bytes: int
    #: Slot sizes are multiples of this; there is a record for each multiple.
    slot_align_bytes: int


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A slot record as it stands in the table."""

    state: SlotState
    record: SlotRecord
    fingerprint: int


@dataclass(frozen=True, slots=True)
class TableNamespace:
    """A namespace as it stands in the table."""

    namespace: NamespaceId
    digest: bytes
    ranks_total: int
    generation: int


class Arena:
    """The host memory of a daemon. Made by create()."""

    def __init__(self, shape: ArenaShape, table_fd: int, data_fd: int) -> None:
        """Take both descriptors over, and lay the tables out in new memory."""
        self.data_fd = data_fd
        self.size_bytes = shape.data_bytes
        self.extent_bytes = shape.extent_bytes
        self.slots_per_extent = shape.slots_per_extent
        self._shape = shape
        self._table_fd = table_fd
        self._table = mmap.mmap(table_fd, shape.table_bytes)
        self._namespaces = self._view(
            layout.NAMESPACE, layout.NAMESPACES_MAX, shape.namespaces_offset_bytes
        )
        self._extents = self._view(layout.EXTENT, shape.extents_total, shape.extents_offset_bytes)
        self._records = self._view(
            layout.RECORD, shape.extents_total * shape.slots_per_extent, shape.records_offset_bytes
        )
        #: Records not FREE, by extent: asking the table itself would touch all of it.
        self._slots_used = [0] * shape.extents_total
        self._write_header()

    @classmethod
    def create(cls, options: ArenaOptions, room: Callable[[], Room] = measure_room) -> Arena:
        """Make a new, empty arena. Its memory is taken as it is first written.

        Raises:
            ArenaFailed: the sizes do not fit each other, or not into the memory there is.
        """
        shape = _shape_of(options)
        free = room()
        needed_bytes = shape.data_bytes + shape.table_bytes
        if needed_bytes + _RESERVE_BYTES > free.bytes_free:
            raise ArenaFailed(
                f"An arena of {shape.data_bytes} bytes with tables of {shape.table_bytes} does "
                f"not fit: {free.bytes_free} bytes are free ({free.limit_name}), and "
                f"{_RESERVE_BYTES} of them must stay so."
            )
        with contextlib.ExitStack() as undo:
            try:
                data_fd = _make_memfd("kvoffd-arena-data", shape.data_bytes)
                undo.callback(os.close, data_fd)
                table_fd = _make_memfd("kvoffd-arena-table", shape.table_bytes)
                undo.callback(os.close, table_fd)
                arena = cls(shape, table_fd, data_fd)
            except OSError as error:
                raise ArenaFailed(f"The memory of the arena cannot be had: {error}") from error
            undo.pop_all()
        return arena

    def close(self) -> None:
        """Give the memory back; it lives on in the copiers that have mapped it."""
        del self._namespaces, self._extents, self._records
        self._table.close()
        os.close(self._table_fd)
        os.close(self.data_fd)

    # --- Writing ------------------------------------------------------------------

    def write_extent(self, extent: int, slot_bytes: int) -> None:
        """Give an extent its class, 0 for none. All its records must be FREE."""
        used = self._slots_used[extent]
        assert used == 0, f"Extent {extent} was to change its class with {used} slots in use."
        assert slot_bytes % self._shape.slot_align_bytes == 0, (
            f"Slots of {slot_bytes} bytes are not aligned."
        )
        assert slot_bytes <= self.extent_bytes, f"Slots of {slot_bytes} bytes fill no extent."
        self._extents["slot_bytes"][extent] = slot_bytes

    def write_records_writing(self, records: Sequence[SlotRecord]) -> None:
        """Say whose bytes are about to be copied into these slots, which must be FREE."""
        if not records:
            return
        slots = np.fromiter((record.slot for record in records), np.int64, len(records))
        self._assert_states(slots, SlotState.FREE)
        self._assert_fit(slots, records)
        table = self._records
        table["rank"][slots] = [record.rank for record in records]
        table["fingerprint"][slots] = np.fromiter(
            (fingerprint_of(record.key) for record in records), np.uint64, len(records)
        )
        table["namespace"][slots] = [record.key.namespace for record in records]
        table["group"][slots] = [record.key.group for record in records]
        table["generation"][slots] = [record.generation for record in records]
        table["sequence"][slots] = [record.sequence for record in records]
        table["length_bytes"][slots] = [record.length_bytes for record in records]
        table["checksum"][slots] = 0
        table["hash_length"][slots] = [len(record.key.block_hash) for record in records]
        hashes = b"".join(
            record.key.block_hash.ljust(layout.HASH_BYTES_MAX, b"\0") for record in records
        )
        table["hash"][slots] = np.frombuffer(hashes, f"V{layout.HASH_BYTES_MAX}")
        # Last: a record is believed only once all of it is there.
        table["state"][slots] = SlotState.WRITING
        self._count(slots, 1)

    def mark_ready(self, slots: Sequence[SlotId]) -> None:
        """Say that these slots' bytes are complete. They must be WRITING."""
        if slots:
            indexes = np.fromiter(slots, np.int64, len(slots))
            self._assert_states(indexes, SlotState.WRITING)
            self._records["state"][indexes] = SlotState.READY

    def mark_free(self, slots: Sequence[SlotId]) -> None:
        """Say that these slots' bytes mean nothing.

        A slot that was given out and that no copy was ever begun for is FREE already: the
        other ranks of a block have one each, and it may be aborted before they come.
        """
        if slots:
            indexes = np.fromiter(slots, np.int64, len(slots))
            assert len(np.unique(indexes)) == len(indexes), "A slot was freed twice in one call."
            used = indexes[self._records["state"][indexes] != SlotState.FREE]
            self._records["state"][used] = SlotState.FREE
            self._count(used, -1)

    def write_namespace(self, index: int, digest: bytes, ranks_total: int, generation: int) -> None:
        """Enter a namespace, or its new generation. To be done before a reset is answered.

        Raises:
            ArenaFailed: the table has no place of this index.
        """
        if not 0 <= index < layout.NAMESPACES_MAX:
            raise ArenaFailed(
                f"The arena keeps at most {layout.NAMESPACES_MAX} namespaces; "
                "restart the daemon to start with none."
            )
        assert 0 < len(digest) <= layout.DIGEST_BYTES_MAX, f"A digest of {len(digest)} bytes."
        assert ranks_total > 0, f"Namespace {index} has {ranks_total} ranks."
        table = self._namespaces
        table["generation"][index] = generation
        table["digest_length"][index] = len(digest)
        table["digest"][index] = np.void(digest.ljust(layout.DIGEST_BYTES_MAX, b"\0"))
        # Last: it makes the entry one in use.
        table["ranks_total"][index] = ranks_total

    # --- Reading ------------------------------------------------------------------

    def read_record(self, slot: SlotId) -> TableRecord:
        """One record as it stands in the table."""
        row = self._records[slot]
        block_hash = row["hash"].tobytes()[: int(row["hash_length"])]
        key = BlockKey(NamespaceId(int(row["namespace"])), int(row["group"]), block_hash)
        record = SlotRecord(
            slot=slot,
            key=key,
            generation=int(row["generation"]),
            rank=int(row["rank"]),
            sequence=int(row["sequence"]),
            length_bytes=int(row["length_bytes"]),
        )
        return TableRecord(SlotState(int(row["state"])), record, int(row["fingerprint"]))

    def read_table(self) -> tuple[TableRecord, ...]:
        """All records that are not FREE."""
        found: list[TableRecord] = []
        for extent, slot_bytes in enumerate(self._extents["slot_bytes"].tolist()):
            if slot_bytes:
                start = extent * self.slots_per_extent
                states = self._records["state"][start : start + self.extent_bytes // slot_bytes]
                found.extend(
                    self.read_record(SlotId(start + offset))
                    for offset in np.flatnonzero(states).tolist()
                )
        return tuple(found)

    def read_extents(self) -> tuple[int, ...]:
        """Slot bytes of each extent, 0 for none."""
        return tuple(self._extents["slot_bytes"].tolist())

    def read_namespaces(self) -> tuple[TableNamespace, ...]:
        """All namespaces in use."""
        return tuple(
            TableNamespace(
                NamespaceId(index),
                row["digest"].tobytes()[: int(row["digest_length"])],
                int(row["ranks_total"]),
                int(row["generation"]),
            )
            for index, row in enumerate(self._namespaces)
            if row["ranks_total"]
        )

    # --- Inside -------------------------------------------------------------------

    def _view(self, record: np.dtype[np.void], count: int, offset_bytes: int) -> NDArray[np.void]:
        return np.ndarray((count,), record, self._table, offset_bytes)

    def _write_header(self) -> None:
        header = self._view(layout.HEADER, 1, 0)
        shape = self._shape
        header["version"] = layout.ARENA_VERSION
        header["namespaces_max"] = layout.NAMESPACES_MAX
        header["data_bytes"] = shape.data_bytes
        header["table_bytes"] = shape.table_bytes
        header["extent_bytes"] = shape.extent_bytes
        header["slot_align_bytes"] = shape.slot_align_bytes
        header["extents_total"] = shape.extents_total
        header["slots_per_extent"] = shape.slots_per_extent
        header["namespaces_offset_bytes"] = shape.namespaces_offset_bytes
        header["extents_offset_bytes"] = shape.extents_offset_bytes
        header["records_offset_bytes"] = shape.records_offset_bytes
        header["magic"] = layout.ARENA_MAGIC

    def _assert_states(self, slots: NDArray[np.int64], expected: SlotState) -> None:
        wrong = slots[self._records["state"][slots] != expected]
        assert not len(wrong), f"Slot {wrong[0]} is not {expected.name}."

    def _assert_fit(self, slots: NDArray[np.int64], records: Sequence[SlotRecord]) -> None:
        """Each record's slot exists in its extent's class, holds its bytes, and comes once."""
        assert len(np.unique(slots)) == len(slots), "A slot was given out twice in one call."
        assert int(slots.min()) >= 0, f"There is no slot {slots.min()}."
        extents, offsets = np.divmod(slots, self.slots_per_extent)
        for record, slot_bytes, offset in zip(
            records, self._extents["slot_bytes"][extents].tolist(), offsets.tolist(), strict=True
        ):
            assert record.length_bytes <= slot_bytes, f"{record} does not fit {slot_bytes} bytes."
            assert (offset + 1) * slot_bytes <= self.extent_bytes, f"{record} leaves its extent."
            hash_bytes = len(record.key.block_hash)
            assert hash_bytes <= layout.HASH_BYTES_MAX, f"A hash of {hash_bytes} bytes."

    def _count(self, slots: NDArray[np.int64], step: int) -> None:
        for extent in (slots // self.slots_per_extent).tolist():
            self._slots_used[extent] += step


def _shape_of(options: ArenaOptions) -> ArenaShape:
    align_bytes, extent_bytes = options.slot_align_bytes, options.extent_bytes
    if align_bytes <= 0 or align_bytes % 64:
        raise ArenaFailed(f"slot_align_bytes is {align_bytes}, not a multiple of 64.")
    if extent_bytes <= 0 or extent_bytes % align_bytes or extent_bytes % mmap.PAGESIZE:
        raise ArenaFailed(
            f"extent_bytes is {extent_bytes}, not a multiple of {mmap.PAGESIZE} and of "
            f"slot_align_bytes, {align_bytes}."
        )
    if options.extents_total <= 0:
        raise ArenaFailed(f"extents_total is {options.extents_total}; an arena needs one.")
    return ArenaShape(options.extents_total, extent_bytes, align_bytes)


def _make_memfd(name: str, size_bytes: int) -> int:
    """Shared memory of a fixed size, its name visible in /proc/<pid>/maps."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # A memfd is born open to all who reach it through /proc.
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(fd)
        raise
    return fd

"""The arena's tables say what was written, byte for byte, and tell the truth when cut off."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import mmap
import os
import struct
from pathlib import Path

import pytest

from kvoffd.arena import format as layout
from kvoffd.arena.arena import Arena, ArenaOptions, TableNamespace
from kvoffd.arena.format import SlotState, fingerprint_of
from kvoffd.arena.room import Room, measure_room
from kvoffd.core.types import BlockKey, NamespaceId, SlotId, SlotRecord
from kvoffd.errors import ArenaFailed

EXTENT_BYTES = 64 * 1024
ALIGN_BYTES = 4096
PER_EXTENT = EXTENT_BYTES // ALIGN_BYTES
OPTIONS = ArenaOptions(extents_total=3, extent_bytes=EXTENT_BYTES, slot_align_bytes=ALIGN_BYTES)


@pytest.fixture
def arena():
    """Three extents of sixteen records."""
    before = {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    made = Arena.create(OPTIONS)
    yield made
    made.close()
    gc.collect()
    after = {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    # Fewer is fine: what somebody else left to the garbage collector may go meanwhile.
    assert after <= before


def _record(slot: int, **changes) -> SlotRecord:
    fields = {
        "slot": SlotId(slot),
        "key": BlockKey(NamespaceId(7), 2, hashlib.sha256(str(slot).encode()).digest()),
        "generation": 2**40 + 1,
        "rank": 3,
        "sequence": 2**50 + slot,
        "length_bytes": 4000,
    }
    return SlotRecord(**fields | changes)


def _table(arena: Arena) -> bytes:
    with mmap.mmap(arena._table_fd, 0, prot=mmap.PROT_READ) as mapping:
        return mapping[:]


def _states(arena: Arena) -> dict[int, SlotState]:
    return {found.record.slot: found.state for found in arena.read_table()}


def test_a_record_lies_in_the_table_as_the_format_says(arena):
    """Read back by offsets written out here, not by the code under test."""
    record = _record(PER_EXTENT + 2)
    arena.write_extent(1, ALIGN_BYTES)
    arena.write_records_writing([record])
    table = _table(arena)
    magic, version, namespaces_max, data_bytes, table_bytes = struct.unpack_from("<QIIQQ", table)
    assert (magic.to_bytes(8, "little"), version, namespaces_max) == (b"KVOFARN1", 1, 4096)
    assert (data_bytes, table_bytes) == (3 * EXTENT_BYTES, len(table))
    geometry = struct.unpack_from("<7Q", table, 32)
    extents_at, records_at = 4096 + 64 * 4096, 4096 + 64 * 4096 + 4096
    assert geometry == (EXTENT_BYTES, ALIGN_BYTES, 3, PER_EXTENT, 4096, extents_at, records_at)
    assert struct.unpack_from("<6Q", table, extents_at) == (0, 0, ALIGN_BYTES, 0, 0, 0)
    row = table[records_at + 128 * (PER_EXTENT + 2) :][:128]
    fingerprint = fingerprint_of(record.key)
    expected = struct.pack("<IIQIIQQQQII", 1, 3, fingerprint, 7, 2, 2**40 + 1,
                           2**50 + PER_EXTENT + 2, 4000, 0, 32, 0)  # fmt: skip
    assert row == expected + record.key.block_hash + bytes(32)
    assert len(table) == records_at + 3 * PER_EXTENT * 128


def test_a_record_lives_through_its_states(arena):
    """WRITING, READY, FREE, and what it said comes back while it is in use."""
    arena.write_extent(0, 8192)
    records = [_record(slot) for slot in (0, 3, 7)]
    arena.write_records_writing(records)
    assert [found.record for found in arena.read_table()] == records
    assert [found.fingerprint for found in arena.read_table()] == [
        fingerprint_of(record.key) for record in records
    ]
    arena.mark_ready([SlotId(3), SlotId(7)])
    assert _states(arena) == {0: SlotState.WRITING, 3: SlotState.READY, 7: SlotState.READY}
    arena.mark_free([SlotId(0), SlotId(7)])
    assert _states(arena) == {3: SlotState.READY}
    again = _record(7, key=BlockKey(NamespaceId(1), 0, b"short"), rank=0, length_bytes=8192)
    arena.write_records_writing([again])
    assert arena.read_record(SlotId(7)).record == again
    assert arena.read_record(SlotId(7)).state is SlotState.WRITING
    arena.mark_free([SlotId(3), SlotId(7)])
    assert arena.read_table() == ()
    arena.write_records_writing([])
    arena.mark_ready([])
    arena.mark_free([])


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (_record(2), "is not FREE"),
        (_record(8), "leaves its extent"),
        (_record(PER_EXTENT), "does not fit 0 bytes"),
        (_record(4, length_bytes=8193), "does not fit 8192 bytes"),
        (_record(4, key=BlockKey(NamespaceId(1), 0, bytes(33))), "hash of 33 bytes"),
        (_record(-1), "no slot"),
    ],
)
def test_a_record_that_cannot_be_is_a_bug_and_changes_nothing(arena, record, sentence):
    """One bad record of several: none of them is written."""
    arena.write_extent(0, 8192)
    arena.write_records_writing([_record(2)])
    before = _table(arena)
    with pytest.raises(AssertionError, match=sentence):
        arena.write_records_writing([_record(1), record])
    assert _table(arena) == before


def test_states_change_in_one_order_only(arena):
    """Ready twice, or ready without a record, is a bug, and changes nothing.

    Freeing what is FREE is none: other ranks' slots of a block are given out with it, and
    it may be aborted before those ranks have come.
    """
    arena.write_extent(0, 8192)
    arena.write_records_writing([_record(0), _record(1)])
    arena.mark_ready([SlotId(0)])
    before = _table(arena)
    with pytest.raises(AssertionError, match="Slot 0 is not WRITING"):
        arena.mark_ready([SlotId(1), SlotId(0)])
    with pytest.raises(AssertionError, match="Slot 2 is not WRITING"):
        arena.mark_ready([SlotId(2)])
    with pytest.raises(AssertionError, match="freed twice in one call"):
        arena.mark_free([SlotId(0), SlotId(0)])
    with pytest.raises(AssertionError, match="given out twice"):
        arena.write_records_writing([_record(3), _record(3)])
    assert _table(arena) == before
    arena.mark_free([SlotId(2), SlotId(0)])
    arena.mark_free([SlotId(0)])
    assert _states(arena) == {1: SlotState.WRITING}
    with pytest.raises(AssertionError, match="with 1 slots in use"):
        arena.write_extent(0, 0)


def test_an_extent_changes_its_class_only_while_it_is_empty(arena):
    """One record in use is enough to refuse; other extents do not matter."""
    arena.write_extent(0, 8192)
    arena.write_extent(1, 4096)
    arena.write_records_writing([_record(0), _record(PER_EXTENT)])
    for slot_bytes in (0, 4096, 8192):
        with pytest.raises(AssertionError, match="Extent 0 was to change"):
            arena.write_extent(0, slot_bytes)
    arena.mark_free([SlotId(0)])
    arena.write_extent(0, 0)
    arena.write_extent(0, EXTENT_BYTES)
    assert arena.read_extents() == (EXTENT_BYTES, 4096, 0)
    for slot_bytes in (100, EXTENT_BYTES + ALIGN_BYTES):
        with pytest.raises(AssertionError, match="Slots of"):
            arena.write_extent(2, slot_bytes)
    # A record of the old class does not show through.
    arena.write_records_writing([_record(0, length_bytes=EXTENT_BYTES)])
    assert _states(arena) == {0: SlotState.WRITING, PER_EXTENT: SlotState.WRITING}


def test_the_state_is_the_last_word_written(arena):
    """A kill between any two stores leaves a FREE record, or a whole one."""
    order = []

    class Recorded:
        def __init__(self, records):
            self._records = records

        def __getitem__(self, name):
            column = self._records[name]
            outer = order

            class Column:
                def __getitem__(self, index):
                    return column[index]

                def __setitem__(self, index, value):
                    outer.append(name)
                    column[index] = value

            return Column()

    arena.write_extent(0, 8192)
    real = arena._records
    arena._records = Recorded(real)
    arena.write_records_writing([_record(0)])
    arena._records = real
    fields = set(layout.RECORD.names) - {"reserved", "reserved_word"}
    assert (order[-1], set(order), len(order)) == ("state", fields, len(fields))


def test_namespaces_keep_their_generation(arena):
    """A reset is one write of one entry; others keep theirs."""
    first, second = hashlib.sha256(b"a").digest(), b"16 bytes of hash"
    arena.write_namespace(0, first, 2, 0)
    arena.write_namespace(4095, second, 8, 2**63)
    arena.write_namespace(0, first, 2, 1)
    assert arena.read_namespaces() == (
        TableNamespace(NamespaceId(0), first, 2, 1),
        TableNamespace(NamespaceId(4095), second, 8, 2**63),
    )
    entry = _table(arena)[4096 : 4096 + 64]
    assert entry == struct.pack("<IIQ32s16x", 2, 32, 1, first)
    for index in (4096, -1):
        with pytest.raises(ArenaFailed, match="at most 4096 namespaces"):
            arena.write_namespace(index, first, 1, 0)


def test_fingerprints_depend_on_every_part_of_the_key():
    """And on nothing else: a fixed value, as another process would compute it."""
    key = BlockKey(NamespaceId(1), 2, b"hash")
    keys = [
        key,
        key._replace(namespace=NamespaceId(2)),
        key._replace(group=1),
        key._replace(block_hash=b"hasi"),
        BlockKey(NamespaceId(2), 1, b"hash"),
    ]
    assert len({fingerprint_of(other) for other in keys}) == 5
    digest = hashlib.blake2b(b"hash", digest_size=8, salt=struct.pack("<QQ", 1, 2)).digest()
    assert fingerprint_of(key) == int.from_bytes(digest, "little")


def test_the_data_is_sealed_shared_memory_with_a_visible_name(arena):
    """A copier may map it without fear; an operator finds it in a process's maps."""
    status = os.fstat(arena.data_fd)
    assert (status.st_size, arena.size_bytes) == (3 * EXTENT_BYTES, 3 * EXTENT_BYTES)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(arena.data_fd, fcntl.F_GET_SEALS) == seals
    assert not os.get_inheritable(arena.data_fd)
    # The data is not mapped here: its bytes are the copiers' business.
    maps = Path("/proc/self/maps").read_text()
    assert ("kvoffd-arena-table" in maps, "kvoffd-arena-data" in maps) == (True, False)
    assert "kvoffd-arena-data" in str(Path(f"/proc/self/fd/{arena.data_fd}").readlink())
    assert status.st_mode & 0o077 == 0


def test_a_large_arena_costs_nothing_before_it_is_used():
    """Tables and data are holes until they are written."""
    options = ArenaOptions(extents_total=256, extent_bytes=1 << 20, slot_align_bytes=64)
    arena = Arena.create(options, room=lambda: Room(1 << 40, "a test"))
    arena.write_extent(255, 1 << 20)
    arena.write_records_writing([_record(255 * (1 << 14))])
    assert len(arena.read_table()) == 1
    for fd in (arena.data_fd, arena._table_fd):
        assert os.fstat(fd).st_blocks * 512 <= 64 * 1024
    arena.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (ArenaOptions(3, 65536, 100), "slot_align_bytes is 100"),
        (ArenaOptions(3, 65536, 0), "slot_align_bytes is 0"),
        (ArenaOptions(3, 65536, 4096 * 3), "extent_bytes is 65536"),
        (ArenaOptions(3, 64 * 65, 64), "extent_bytes is 4160"),
        (ArenaOptions(0, 65536, 4096), "extents_total is 0"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(options, sentence):
    """With the setting's name and value."""
    with pytest.raises(ArenaFailed, match=sentence):
        Arena.create(options)


def test_an_arena_that_does_not_fit_is_refused_with_numbers():
    """What is asked, what is free and what sets the limit; nothing is left open."""
    before = {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    shape = layout.ArenaShape(3, EXTENT_BYTES, ALIGN_BYTES)
    needed = shape.data_bytes + shape.table_bytes + 64 * 1024 * 1024
    with pytest.raises(ArenaFailed, match=rf"196608 bytes .* {needed - 1} bytes are free \(a te"):
        Arena.create(OPTIONS, room=lambda: Room(needed - 1, "a test"))
    with pytest.raises(ArenaFailed, match=r"MemAvailable|memory\.max"):
        Arena.create(ArenaOptions(1 << 20, 1 << 30, 1 << 20))
    Arena.create(OPTIONS, room=lambda: Room(needed, "a test")).close()
    after = {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    # Fewer is fine: what somebody else left to the garbage collector may go meanwhile.
    assert after <= before


def _machine(tmp_path, cgroup: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 1 kB\nMemAvailable: 1000 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc


def _limit(folder: Path, limit: str, used: int, inactive_file: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_the_tightest_cgroup_above_us_sets_the_limit(tmp_path):
    """Ours, its parents', or the machine; clean file pages count as free."""
    proc = _machine(tmp_path, "0::/kube/pod/container\n")
    root = tmp_path / "cgroup"
    folder = root / "kube" / "pod" / "container"
    _limit(folder, "max", 1, 0)
    assert measure_room(proc, root) == Room(1024_000, "MemAvailable of /proc/meminfo")
    _limit(folder.parent, "500000", 300_000, 50_000)
    assert measure_room(proc, root) == Room(250_000, f"memory.max of {folder.parent}")
    _limit(folder, "100000", 200_000, 0)
    assert measure_room(proc, root) == Room(0, f"memory.max of {folder}")


@pytest.mark.parametrize("membership", ["", "4:memory:/old\n", "0::/gone\n", "0::/\n"])
def test_without_a_cgroup_limit_the_machine_sets_it(tmp_path, membership):
    """No unified hierarchy, a folder that is gone, or the root: no limit of theirs."""
    proc = _machine(tmp_path, membership)
    assert measure_room(proc, tmp_path / "cgroup").bytes_free == 1024_000

"""The ticket page between the client's half and ours: who may write, and who can prove it."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import subprocess
import sys

import pytest
from copier.rig import SHARD_BYTES, Rig

from kvoffd.copier import tickets as ours
from kvoffd.copier.frames import Outcome
from kvoffd.errors import MemoryRefused
from kvoffd_client import tickets as theirs
from kvoffd_client.memory import SharedMemory
from kvoffd_client.tickets import LoadProof, TicketPage

CELL = 5
LOCK_BYTE = 4096 + 64 * CELL


def _word(ticket_page: TicketPage, offset: int) -> int:
    return int.from_bytes(ticket_page.memory.buffer[offset : offset + 8], "little")


def _set_state(ticket_page: TicketPage, cell: int, state: int) -> None:
    ticket_page.memory.buffer[4096 + 64 * cell + 16 : 4096 + 64 * cell + 24] = state.to_bytes(
        8, "little"
    )


@pytest.fixture
def ticket_page():
    """The client's page, with job 77 in cell 5."""
    made = TicketPage.create(8)
    for job_id in (1, 2, 3, 4, 5):
        made.allocate(job_id)
    assert made.allocate(77) == CELL
    yield made
    made.close()


def test_both_halves_agree_on_the_constants():
    """The two implementations share no code, only these figures."""
    assert (ours.TICKET_MAGIC, ours.TICKET_VERSION) == (theirs.MAGIC, theirs.VERSION)
    assert (ours.HEADER_BYTES, ours.CELL_BYTES) == (theirs.HEADER_BYTES, theirs.CELL_BYTES)


def test_what_one_half_writes_the_other_half_reads(ticket_page):
    """Doorbell, job, revoked, state and incarnation lie where the other half looks."""
    copier = ours.TicketPage(ticket_page.memory.fd, 8)
    assert copier.doorbell == 0
    ticket_page.ring()
    assert copier.doorbell == ticket_page.bell == _word(ticket_page, 64) == 1
    assert copier.is_live(CELL, 77)
    assert not copier.is_live(CELL, 78)
    assert not copier.is_live(6, 77)
    copier.begin(CELL, 2**63 + 9)
    assert ticket_page.incarnation(CELL) == 2**63 + 9
    assert _word(ticket_page, 4096 + 64 * CELL + 16) == 1
    copier.finish(CELL)
    assert ticket_page.is_loaded(CELL, 77)
    ticket_page.revoke(CELL)
    assert not copier.is_live(CELL, 77)
    assert copier.is_live(4, 5)
    copier.close()


@pytest.mark.parametrize(
    ("state", "proof"),
    [
        (ours.STATE_UNTOUCHED, LoadProof.UNTOUCHED),
        (ours.STATE_STARTED, LoadProof.INTERRUPTED),
        (ours.STATE_DONE, LoadProof.LOADED),
        (ours.STATE_GIVEN_UP, LoadProof.GIVEN_UP),
    ],
)
def test_each_state_has_its_proof(ticket_page, state, proof):
    """The states that we write mean to the client what they mean to us."""
    _set_state(ticket_page, CELL, state)
    assert ticket_page.try_end_load(CELL) is proof


def test_given_up_touches_only_the_cell_of_its_own_job(ticket_page):
    """A cell that has gone to another job is not ours to mark."""
    copier = ours.TicketPage(ticket_page.memory.fd, 8)
    copier.give_up(CELL, 76)
    assert ticket_page.try_end_load(CELL) is LoadProof.UNTOUCHED
    copier.give_up(CELL, 77)
    assert ticket_page.try_end_load(CELL) is LoadProof.GIVEN_UP
    copier.close()


def test_the_lock_byte_is_the_same(ticket_page):
    """A lock that another process takes on the cell's byte keeps both halves out."""
    holder = (
        "import fcntl,sys;"
        f"fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 1, {LOCK_BYTE});"
        "print('held', flush=True); sys.stdin.read()"
    )
    copier = ours.TicketPage(ticket_page.memory.fd, 8)
    fd = ticket_page.memory.fd
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        assert not copier.try_lock(CELL)
        assert copier.try_lock(CELL + 1)
        copier.unlock(CELL + 1)
        assert ticket_page.try_end_load(CELL) is LoadProof.RUNNING
        process.stdin.close()
        process.wait()
    assert copier.try_lock(CELL)
    copier.unlock(CELL)
    copier.close()


def _sealed(size_bytes: int, magic: bytes, version: int, cells: int) -> SharedMemory:
    memory = SharedMemory.create("tickets", size_bytes)
    memory.buffer[:16] = magic + version.to_bytes(4, "little") + cells.to_bytes(4, "little")
    return memory


@pytest.mark.parametrize(
    ("size_bytes", "magic", "version", "cells", "asked"),
    [
        (8192, b"KVOFTKT2", 1, 8, 8),
        (8192, b"KVOFTKT1", 2, 8, 8),
        (8192, b"KVOFTKT1", 1, 7, 8),
        (4096 + 64 * 8 - 1, b"KVOFTKT1", 1, 8, 8),
        (8192, b"KVOFTKT1", 1, 0, 0),
        (8192, b"KVOFTKT1", 1, 8, 2**21),
    ],
    ids=["magic", "version", "cells", "short", "no cells", "too many cells"],
)
def test_what_is_no_ticket_page_is_refused(size_bytes, magic, version, cells, asked):
    """Each refusal is a sentence, and leaves no descriptor open."""
    memory = _sealed(size_bytes, magic, version, cells)
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all we want
    with pytest.raises(MemoryRefused, match=r"ticket page .*\.$"):
        ours.TicketPage(memory.fd, asked)
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - the same
    memory.close()


def test_unsealed_tickets_are_refused():
    """The client could shrink it under us."""
    fd = os.memfd_create("tickets", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    with mmap.mmap(fd, 8192) as mapping:
        mapping[:16] = b"KVOFTKT1" + (1).to_bytes(4, "little") + (8).to_bytes(4, "little")
    with pytest.raises(MemoryRefused, match=r"not sealed against shrinking\."):
        ours.TicketPage(fd, 8)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    ours.TicketPage(fd, 8).close()
    os.close(fd)


# --- Against a real copier ------------------------------------------------------------


def test_a_job_is_parked_until_its_bell_and_blocks_nobody(run):
    """A store and a load wait for the doorbell; younger jobs, here and elsewhere, pass them."""

    async def scenario():
        async with Rig() as rig:
            engine, other = rig.engine(seed=1), rig.engine(seed=2)
            pool, other_pool = await rig.open(engine), await rig.open(other)
            load_job = rig.job(engine)
            early = rig.store(pool, rig.job(engine), [1], [0], bell=2)
            load = rig.load(pool, load_job, [2], [SHARD_BYTES * 4], bell=1)
            rung = rig.store(pool, rig.job(engine), [3], [SHARD_BYTES], bell=0)
            elsewhere = rig.store(other_pool, rig.job(other), [1], [SHARD_BYTES * 2])
            for batch in (rung, elsewhere):
                assert (await rig.end(batch)).outcome is Outcome.COPIED
            await rig.round_trip()
            assert set(rig.ends) == {rung, elsewhere}
            # What the block holds when the bell rings is what is stored.
            for memory in engine.memories:
                memory.buffer[1024:2048] = bytes(1024)
            engine.tickets.ring()
            assert (await rig.end(load)).outcome is Outcome.COPIED
            assert early not in rig.ends
            engine.tickets.ring()
            assert (await rig.end(early)).outcome is Outcome.COPIED
            assert rig.slot(0) == engine.block(1)
            assert engine.block(2) == bytes(SHARD_BYTES)

    run(scenario)


def test_a_revoked_store_is_never_reported_as_copied(run):
    """Revoked before the copy, or given to another job: REVOKED, however often it is tried."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            job = rig.job(engine)
            engine.tickets.revoke(job[1])
            end = await rig.end(rig.store(pool, job, [1], [0]))
            assert (end.outcome, end.bytes_copied) == (Outcome.REVOKED, 0)
            parked_job = rig.job(engine)
            parked = rig.store(pool, parked_job, [1], [0], bell=1)
            await rig.round_trip()
            engine.tickets.free(parked_job[1])
            engine.tickets.ring()
            assert (await rig.end(parked)).outcome is Outcome.REVOKED

    run(scenario)


def test_a_store_revoked_under_its_copy_is_not_reported_as_copied(run):
    """Between its first slice and its last read of the cell a fence still counts."""

    async def scenario():
        async with Rig(arena_bytes=256 << 20) as rig:
            engine = rig.engine(pool_blocks=4, block_bytes=1 << 20)
            pool = await rig.open(engine)
            job = rig.job(engine)
            size = engine.shard_bytes
            blocks = [number % 4 for number in range(60)]
            store = rig.store(pool, job, blocks, [size * n for n in range(60)])
            # First touch of 240 MiB takes longer than one turn of this loop.
            while rig.arena.buffer[:8] == bytes(8):  # noqa: ASYNC110 - it is a word in memory
                await asyncio.sleep(0)
            engine.tickets.revoke(job[1])
            end = await rig.end(store)
            assert end.outcome is Outcome.REVOKED
            assert end.bytes_copied < 60 * size

    run(scenario)


def test_a_load_revoked_before_its_start_writes_nothing(run):
    """The client's proof holds: after it, not a byte of the pool changes."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            before = engine.pool()
            job = rig.job(engine)
            load = rig.load(pool, job, [1, 2], [0, SHARD_BYTES], bell=1)
            assert engine.tickets.try_end_load(job[1]) is LoadProof.UNTOUCHED
            engine.tickets.ring()
            assert (await rig.end(load)).outcome is Outcome.REVOKED
            assert engine.tickets.try_end_load(job[1]) is LoadProof.GIVEN_UP
            assert engine.pool() == before

    run(scenario)


def test_a_load_waits_for_a_lock_that_the_client_has_and_lets_others_pass(run):
    """A taken lock stops one load only, and is tried again."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            job, other = rig.job(engine), rig.job(engine)
            fd = engine.tickets.memory.fd
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 4096 + 64 * job[1])
            waits = rig.load(pool, job, [1], [0])
            passes = rig.load(pool, other, [2], [0])
            assert (await rig.end(passes)).outcome is Outcome.COPIED
            store = rig.store(pool, rig.job(engine), [3], [SHARD_BYTES])
            assert (await rig.end(store)).outcome is Outcome.COPIED
            assert waits not in rig.ends
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, 4096 + 64 * job[1])
            assert (await rig.end(waits)).outcome is Outcome.COPIED
            assert engine.block(1) == bytes(SHARD_BYTES)

    run(scenario)


def test_a_load_revoked_under_its_copy_ends_and_says_so(run):
    """The client gets its proof after a slice, not after the whole load."""

    async def scenario():
        async with Rig(arena_bytes=256 << 20) as rig:
            engine = rig.engine(pool_blocks=60, block_bytes=1 << 20)
            pool = await rig.open(engine)
            job = rig.job(engine)
            size = engine.shard_bytes
            load = rig.load(pool, job, list(range(60)), [size * n for n in range(60)])
            await rig.started(engine, job[1])
            proof = engine.tickets.try_end_load(job[1])
            while not proof.is_final:
                assert proof is LoadProof.RUNNING
                proof = engine.tickets.try_end_load(job[1])
            assert proof is LoadProof.GIVEN_UP
            after = engine.pool()
            end = await rig.end(load)
            assert end.outcome is Outcome.REVOKED
            assert end.bytes_copied < 60 * size
            assert engine.pool() == after

    run(scenario)


def test_a_load_past_its_deadline_writes_nothing_and_says_so(run):
    """Parked past its deadline it ends, and its cell proves it at once."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            before = engine.pool()
            late, parked = rig.job(engine), rig.job(engine)
            batches = [
                rig.load(pool, late, [1], [0], budget_ms=-1),
                rig.load(pool, parked, [1], [0], bell=1, budget_ms=20),
            ]
            for batch in batches:
                assert (await rig.end(batch)).outcome is Outcome.DEADLINE
            for job in (late, parked):
                assert engine.tickets.try_end_load(job[1]) is LoadProof.GIVEN_UP
            engine.tickets.ring()
            await rig.round_trip()
            assert engine.pool() == before

    run(scenario)

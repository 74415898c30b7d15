"""Memory that a copier will not map is refused with a sentence, and the copier lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import msgspec
import pytest
from copier.rig import Rig

from kvoffd.copier.frames import Outcome
from kvoffd.copier.supervisor import PoolDescription, Region
from kvoffd.errors import MemoryRefused
from kvoffd_client.memory import SharedMemory

SIZE = 8192


@contextlib.contextmanager
def _unsealed():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 32768)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def _too_small():
    memory = SharedMemory.create("small", 32767)
    yield memory.fd
    memory.close()


@contextlib.contextmanager
def _plain_file(tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(bytes(32768))
    with path.open("r+b") as file:
        yield file.fileno()


@contextlib.contextmanager
def _pipe():
    reader, writer = os.pipe()
    yield reader
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def _socket():
    with socket.socket(socket.AF_UNIX) as made:
        yield made.fileno()


@contextlib.contextmanager
def _device():
    fd = os.open("/dev/zero", os.O_RDWR)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def _read_only():
    memory = SharedMemory.create("read-only", 32768)
    fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY)
    yield fd
    os.close(fd)
    memory.close()


@pytest.mark.parametrize(
    ("offer", "sentence"),
    [
        (_unsealed, "is not sealed against shrinking"),
        (_too_small, "has 32767 bytes, but 32768 bytes were described"),
        (_plain_file, "is not"),
        (_pipe, "is not a memfd"),
        (_socket, "is not a memfd"),
        (_device, "is not a memfd"),
        (_read_only, "cannot be mapped"),
    ],
)
def test_memory_that_is_not_as_described_is_refused(run, tmp_path, offer, sentence):
    """As a memory and as a ticket page; then the same copier opens a good pool and copies."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            offered = offer(tmp_path) if offer is _plain_file else offer()
            with offered as fd:
                for place in range(3):
                    fds = engine.fds
                    fds[place] = fd
                    # Both memories have 32768 bytes; so has, to the page, this description.
                    description = msgspec.structs.replace(
                        engine.description, ticket_cells=64 if place < 2 else (32768 - 4096) // 64
                    )
                    with pytest.raises(MemoryRefused, match=sentence):
                        await rig.copier.open_pool(description, fds)
            pool = await rig.open(engine)
            end = await rig.end(rig.store(pool, rig.job(engine), [3], [0]))
            assert end.outcome is Outcome.COPIED
            assert rig.slot(0) == engine.block(3)
            assert [event[0] for event in rig.events] == ["up", "end"]

    run(scenario)


def _region(**changes) -> Region:
    fields = {
        "group": 0,
        "memory": 0,
        "offset_bytes": 0,
        "block_stride_bytes": 512,
        "block_bytes": 512,
    }
    return Region(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"regions": ()}, "at least one region"),
        ({"pool_blocks": 0}, "cannot have 0 blocks"),
        ({"pool_blocks": 2**32}, "cannot have 4294967296 blocks"),
        ({"pool_blocks": 17}, "ends at byte 8704"),
        ({"memory_sizes": (0,)}, "cannot have 0 bytes"),
        ({"memory_sizes": (2**63,)}, "cannot have 9223372036854775808 bytes"),
        ({"regions": (_region(memory=1),)}, "never offered"),
        ({"regions": (_region(memory=-1),)}, "never offered"),
        ({"regions": (_region(block_bytes=0),)}, "no bytes"),
        ({"regions": (_region(offset_bytes=-8),)}, "begins before"),
        ({"regions": (_region(offset_bytes=8),)}, "ends at byte 8200"),
        ({"regions": (_region(block_bytes=513),)}, "only 512 bytes apart"),
        ({"ticket_cells": 0}, "cannot have 0 cells"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(changes, sentence):
    """Said before a mapping is made, where it can be."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            fields = {
                "regions": (_region(),),
                "pool_blocks": 16,
                "memory_sizes": (SIZE,),
                "ticket_cells": 64,
            }
            description = PoolDescription(**fields | changes)
            fds = [engine.memories[0].fd, engine.tickets.memory.fd]
            with pytest.raises(MemoryRefused, match=sentence):
                await rig.copier.open_pool(description, fds)

    asyncio.run(scenario())


def test_too_many_memories_or_regions_are_refused(run):
    """What does not fit into a frame, or beside it, is the caller's to change."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            with pytest.raises(MemoryRefused, match="came with 2 descriptors"):
                await rig.copier.open_pool(engine.description, engine.fds[:2])
            fd = engine.memories[0].fd
            many = msgspec.structs.replace(engine.description, memory_sizes=(32768,) * 253)
            with pytest.raises(MemoryRefused, match="at most 253"):
                await rig.copier.open_pool(many, [fd] * 254)
            regions = msgspec.structs.replace(
                engine.description, regions=tuple(_region() for _ in range(20_000))
            )
            with pytest.raises(MemoryRefused, match="longer than a frame"):
                await rig.copier.open_pool(regions, engine.fds)
            await rig.open(engine)

    run(scenario)

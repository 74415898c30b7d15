"""A rank's memory written from the protocol alone: a pool of known bytes, and a ticket page."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import struct

from kvoffd_proto.v1 import offload_pb2

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
CELLS = 64


def make_memfd(size_bytes: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Pool:
    """A KV pool whose blocks' bytes are a function of a number."""

    def __init__(self, blocks: int = 64, layers: int = 3, block_bytes: int = 4096) -> None:
        self.blocks = blocks
        self.layers = layers
        self.block_bytes = block_bytes
        self.size_bytes = blocks * layers * block_bytes
        self.fd = make_memfd(self.size_bytes)
        self._bytes = mmap.mmap(self.fd, self.size_bytes)

    def close(self) -> None:
        self._bytes.close()
        os.close(self.fd)

    def regions(self, memory_index: int = 0) -> list[offload_pb2.Region]:
        return [
            offload_pb2.Region(
                group=0,
                memory_index=memory_index,
                offset_bytes=layer * self.blocks * self.block_bytes,
                block_stride_bytes=self.block_bytes,
                block_bytes=self.block_bytes,
            )
            for layer in range(self.layers)
        ]

    def fill(self, block_id: int, number: int) -> None:
        content = self.content(number)
        for layer in range(self.layers):
            start = (layer * self.blocks + block_id) * self.block_bytes
            part = content[layer * self.block_bytes : (layer + 1) * self.block_bytes]
            self._bytes[start : start + self.block_bytes] = part

    def content(self, number: int) -> bytes:
        return random.Random(number).randbytes(self.layers * self.block_bytes)

    def read(self, block_id: int) -> bytes:
        starts = [
            (layer * self.blocks + block_id) * self.block_bytes for layer in range(self.layers)
        ]
        return b"".join(self._bytes[start : start + self.block_bytes] for start in starts)


class Tickets:
    """A ticket page: header with a doorbell, then cells of 64 bytes."""

    def __init__(self, cells: int = CELLS) -> None:
        self.cells = cells
        self.size_bytes = 4096 + 64 * cells
        self.fd = make_memfd(self.size_bytes)
        self._bytes = mmap.mmap(self.fd, self.size_bytes)
        struct.pack_into("<QII", self._bytes, 0, int.from_bytes(b"KVOFTKT1", "little"), 1, cells)

    def close(self) -> None:
        self._bytes.close()
        os.close(self.fd)

    def ring(self, bell: int) -> None:
        struct.pack_into("<Q", self._bytes, 64, bell)

    def issue(self, cell: int, job_id: int) -> None:
        at = 4096 + 64 * cell
        struct.pack_into("<QQQ", self._bytes, at + 8, 0, 0, 0)
        struct.pack_into("<Q", self._bytes, at, job_id)

    def revoke(self, cell: int) -> None:
        struct.pack_into("<Q", self._bytes, 4096 + 64 * cell + 8, 1)

    def state(self, cell: int) -> int:
        found: int = struct.unpack_from("<Q", self._bytes, 4096 + 64 * cell + 16)[0]
        return found

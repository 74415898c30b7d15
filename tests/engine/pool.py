"""One rank's paged pool: shared memory that copiers map, and a shadow that only we know.

Owns the memory of one rank. Engine thread. Every write by the engine goes into both pool and
shadow; so whatever else changes the pool is seen by `audit`, whenever it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.engine.content import POISON, TokenChain, token_bytes

if TYPE_CHECKING:
    from collections.abc import Collection


class WrongBytes(AssertionError):
    """The oracle's finding: memory is not what it must be."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes of a pool; equal for all ranks and instances of a namespace."""

    arrangement: str
    blocks: int
    block_tokens: int
    layers: int
    token_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """Where one region's blocks lie; field for field what a rank registers."""

    memory: int
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int


ARRANGEMENTS = ("layer-major", "block-major", "keys-and-values-apart", "memory-a-layer")


def regions_of(shape: PoolShape) -> tuple[list[PoolRegion], list[int]]:
    """The regions of a shape, and the sizes of the memories that they lie in."""
    size = shape.block_bytes
    plane = size * shape.blocks
    if shape.arrangement == "layer-major":
        regions = [PoolRegion(0, layer * plane, size, size) for layer in range(shape.layers)]
        return regions, [plane * shape.layers]
    if shape.arrangement == "block-major":
        stride = size * shape.layers
        regions = [PoolRegion(0, layer * size, stride, size) for layer in range(shape.layers)]
        return regions, [plane * shape.layers]
    if shape.arrangement == "keys-and-values-apart":
        half = size // 2
        regions = [
            PoolRegion(0, (layer * 2 + part) * half * shape.blocks, half, half)
            for layer in range(shape.layers)
            for part in range(2)
        ]
        return regions, [plane * shape.layers]
    assert shape.arrangement == "memory-a-layer", shape.arrangement
    return (
        [PoolRegion(layer, 0, size, size) for layer in range(shape.layers)],
        [plane] * shape.layers,
    )


class Pool:
    """Blocks of one rank. `buffers` are writable maps of the memories, one each."""

    def __init__(self, shape: PoolShape, rank: int, buffers: list[memoryview]) -> None:
        self.shape = shape
        self.rank = rank
        self.regions, sizes = regions_of(shape)
        assert [len(buffer) for buffer in buffers] == sizes, (list(map(len, buffers)), sizes)
        self._buffers = buffers
        self._shadows = [bytearray(buffer) for buffer in buffers]

    def close(self) -> None:
        """Let go of the maps, so that their owner can close them."""
        for buffer in self._buffers:
            buffer.release()

    def write_tokens(
        self,
        chain: TokenChain,
        blocks: list[int],
        first: int,
        after: int,
        weights: int,
        regions: Collection[int] | None = None,
    ) -> None:
        """What a forward does: the KV of tokens first to after - 1, each in its place."""
        for position in range(first, after):
            block = blocks[position // self.shape.block_tokens]
            for region in range(len(self.regions)) if regions is None else regions:
                self._write(
                    region,
                    block,
                    position % self.shape.block_tokens,
                    self._expected(chain, position, region, weights),
                )

    def poison(self, block: int) -> None:
        """Fill a load's destination with what no token has."""
        for index, region in enumerate(self.regions):
            begin = region.offset_bytes + block * region.block_stride_bytes
            self._put(index, begin, bytes([POISON]) * region.block_bytes)

    def check_tokens(
        self,
        chain: TokenChain,
        blocks: list[int],
        after: int,
        weights: int,
        why: str,
        regions: Collection[int] | None = None,
    ) -> None:
        """What attention does: read all tokens before after.

        Raises:
            WrongBytes: one of them is not the KV of its prefix.
        """
        for position in range(after):
            block = blocks[position // self.shape.block_tokens]
            for region in range(len(self.regions)) if regions is None else regions:
                begin, end = self._place(region, block, position % self.shape.block_tokens)
                found = bytes(self._buffers[self.regions[region].memory][begin:end])
                expected = self._expected(chain, position, region, weights)
                if found != expected:
                    raise WrongBytes(
                        f"{why}: rank {self.rank} block {block} (index "
                        f"{position // self.shape.block_tokens}) token {position} region {region}: "
                        f"found {found[:16].hex()}, expected {expected[:16].hex()}"
                    )

    def read_block(self, block: int) -> list[bytes]:
        """What a copier that stores reads: one piece a region."""
        return [
            bytes(self._buffers[region.memory][begin : begin + region.block_bytes])
            for region in self.regions
            for begin in (region.offset_bytes + block * region.block_stride_bytes,)
        ]

    def put_block(self, block: int, pieces: list[bytes]) -> None:
        """What a copier that loads writes: past the shadow, as another process does."""
        for region, piece in zip(self.regions, pieces, strict=True):
            begin = region.offset_bytes + block * region.block_stride_bytes
            self._buffers[region.memory][begin : begin + region.block_bytes] = piece

    def accept(self, block: int) -> None:
        """A load over this block was reported: from now on nobody but us may write to it."""
        for region in self.regions:
            begin = region.offset_bytes + block * region.block_stride_bytes
            end = begin + region.block_bytes
            self._shadows[region.memory][begin:end] = self._buffers[region.memory][begin:end]

    def audit(self, loading: Collection[int], why: str) -> None:
        """Compare every block that no load may write to with its shadow.

        Raises:
            WrongBytes: somebody wrote where nobody might.
        """
        if not loading and all(
            bytes(buffer) == shadow
            for buffer, shadow in zip(self._buffers, self._shadows, strict=True)
        ):
            return
        for index, region in enumerate(self.regions):
            buffer, shadow = self._buffers[region.memory], self._shadows[region.memory]
            for block in range(self.shape.blocks):
                begin = region.offset_bytes + block * region.block_stride_bytes
                end = begin + region.block_bytes
                if block not in loading and bytes(buffer[begin:end]) != shadow[begin:end]:
                    raise WrongBytes(
                        f"{why}: rank {self.rank} block {block} region {index} was written "
                        "although no load was out for it"
                    )

    def _expected(self, chain: TokenChain, position: int, region: int, weights: int) -> bytes:
        size = self.regions[region].block_bytes // self.shape.block_tokens
        return token_bytes(
            chain.digest_of(position), weights, self.rank, region, len(self.regions), size
        )

    def _place(self, region: int, block: int, token: int) -> tuple[int, int]:
        place = self.regions[region]
        size = place.block_bytes // self.shape.block_tokens
        begin = place.offset_bytes + block * place.block_stride_bytes + token * size
        return begin, begin + size

    def _write(self, region: int, block: int, token: int, content: bytes) -> None:
        begin, _ = self._place(region, block, token)
        self._put(region, begin, content)

    def _put(self, region: int, begin: int, content: bytes) -> None:
        memory = self.regions[region].memory
        self._buffers[memory][begin : begin + len(content)] = content
        self._shadows[memory][begin : begin + len(content)] = content

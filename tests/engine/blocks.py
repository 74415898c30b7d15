"""The engine's own block table: free list, reference counts and prefix cache, as vLLM's.

Owns which block belongs to whom. Engine thread. Block 0 is never given out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockTable:
    """A block is free when nobody counts on it; a free block keeps its hash until reused."""

    def __init__(self, blocks: int, *, reuse_at_once: bool) -> None:
        #: True: a freed block is the next to be given out, the worst case for late readers.
        self._reuse_at_once = reuse_at_once
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._users = [0] * blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._total = blocks - 1

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def all_free(self) -> bool:
        return len(self._free) == self._total

    def prefix_of(self, hashes: Sequence[bytes], blocks_max: int) -> list[int]:
        """Blocks of the longest prefix that is here; nothing changes."""
        found: list[int] = []
        for block_hash in hashes[:blocks_max]:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def room_for(self, shared: Sequence[int], fresh: int) -> bool:
        """Whether fresh more blocks can be had once shared are taken."""
        taken = sum(1 for block in shared if self._users[block] == 0)
        return len(self._free) - taken >= fresh

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user on each."""
        for block in blocks:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """Give out free blocks; what they held is forgotten."""
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less on each, the prefix's tail first, as vLLM frees."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} freed twice"
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if self._reuse_at_once:
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, block_hash: bytes) -> bool:
        """Enter a full block into the prefix cache; False when the hash is there already."""
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        return True

    def forget_hash(self, block: int) -> None:
        """Take a block out of the prefix cache: what it should hold was never written."""
        self._forget(block)

    def forget_all(self) -> None:
        """Drop the prefix cache."""
        self._hash_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

"""Policy: the protocol of everything that chooses which block is evicted.

A policy is told of each use of a ready block, and which blocks may go now: those
without a hold and without a child in the index. That is the index's judgement; a
policy orders, it never judges. It treats entries as opaque, never changes one, and
finds its answer without a scan over all blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvoffd.core.entry import BlockEntry


class Policy(Protocol):
    """Chooses victims. Recency: the greater, the longer a block is worth keeping."""

    def touch(self, entry: BlockEntry) -> int:
        """Note a use of a ready block; answers its recency from now on."""

    def recency(self, entry: BlockEntry) -> int:
        """Of a block that was touched and not forgotten."""

    def add(self, entry: BlockEntry) -> None:
        """The block may be evicted from now on; it was touched before."""

    def remove(self, entry: BlockEntry) -> None:
        """The block may not be evicted any more; its recency stays known."""

    def forget(self, entry: BlockEntry) -> None:
        """The block is gone for good; it has been removed before."""

    def coldest(self, slot_bytes: int) -> BlockEntry | None:
        """Of the blocks in slots of this size that may be evicted, the next one to go."""

    def evictable(self) -> Collection[BlockEntry]:
        """All blocks that may be evicted, for check_invariants."""

    def known(self) -> Collection[BlockEntry]:
        """All blocks whose recency is known, for check_invariants."""

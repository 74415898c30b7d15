"""Blocks: the life of every block entry, from its slots' allocation to their return.

Owns the entries, and through them index, allocator and policy, which nobody else
changes. Called by Stores, Leases and Cache on the loop thread. Knows nothing of jobs,
leases or time.

The safety of the whole daemon lies here: a slot is freed only by `_release` and
`_release_slot`, and only when no copy may be running on it (`open` is clear) and
nobody holds its block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.allocator import Allocator
from kvoffd.core.entry import BlockEntry, BlockState
from kvoffd.core.eviction import Eviction
from kvoffd.core.index import Index
from kvoffd.core.namespaces import Namespaces

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvoffd.core.namespaces import Namespace
    from kvoffd.core.policy.base import Policy
    from kvoffd.core.turn import Turn
    from kvoffd.core.types import BlockKey, CacheOptions, JobRef


class Blocks:
    """All block entries. The public attributes are for reading."""

    def __init__(self, options: CacheOptions, policy: Policy) -> None:
        self.policy = policy
        self.namespaces = Namespaces(options.extent_bytes, options.slot_align_bytes)
        self.allocator = Allocator(
            options.extents_total, options.extent_bytes, options.slot_align_bytes
        )
        self.index = Index(policy)
        self._eviction = Eviction(self.index, self.allocator, policy)
        self._sequences = 0
        self.pending = 0
        self.holds = 0
        self.slots_quarantined = 0
        self.evicted = 0

    def insert(
        self,
        turn: Turn,
        key: BlockKey,
        parent: BlockKey | None,
        namespace: Namespace,
        writer: JobRef,
        position: int,
    ) -> BlockEntry | None:
        """A new pending entry under a key that is not in the index, with slots for all ranks.

        None, and nothing changed, when there is no room.
        """
        ranks = namespace.ranks_total
        slot_bytes = namespace.slot_bytes[key.group]
        if self.allocator.available(slot_bytes) < ranks:
            victims = self._eviction.make_room(turn, slot_bytes, ranks)
            if victims is None:
                return None
            for victim in victims:
                self._evict(turn, victim)
        self._sequences += 1
        entry = BlockEntry(
            key,
            parent,
            namespace.generation,
            self._sequences,
            namespace.shard_bytes[key.group],
            slot_bytes,
            writer,
            position,
        )
        entry.slots = self.allocator.allocate(entry, ranks)
        entry.extents = self.allocator.extents_of(entry.slots)
        entry.ranks_all = entry.occupied = (1 << ranks) - 1
        namespace.bytes_used += ranks * slot_bytes
        self.index.link(entry)
        self.pending += 1
        return entry

    def open_shard(self, entry: BlockEntry, rank: int) -> None:
        """A copy into this rank's slot may run from now on."""
        assert entry.state is BlockState.PENDING, f"a copy is planned into {entry}"
        assert not (entry.open | entry.committed) >> rank & 1, f"two copies of {rank} into {entry}"
        entry.open |= 1 << rank

    def commit_shard(self, turn: Turn, entry: BlockEntry, rank: int) -> bool:
        """The copy has ended well. True if the block became ready by that."""
        self._close_shard(entry, rank)
        if entry.state is BlockState.ABORTED:
            self.slots_quarantined -= 1
            self._release_slot(turn, entry, rank)
            return False
        entry.committed |= 1 << rank
        if entry.committed != entry.ranks_all:
            return False
        self._seal(turn, entry)
        return True

    def abort_shard(self, turn: Turn, entry: BlockEntry, rank: int) -> None:
        """The copy has ended badly, or never began. Aborts the block for all ranks."""
        self._close_shard(entry, rank)
        if entry.state is BlockState.ABORTED:
            self.slots_quarantined -= 1
            self._release_slot(turn, entry, rank)
        else:
            self.abort(turn, entry)

    def abort(self, turn: Turn, entry: BlockEntry) -> None:
        """Give up a pending entry: unfindable at once; slots under a copy stay taken."""
        assert entry.state is BlockState.PENDING, f"cannot abort {entry}"
        entry.state = BlockState.ABORTED
        self.pending -= 1
        self.index.unlink(entry)
        for rank in range(len(entry.slots)):
            if entry.open >> rank & 1:
                self.slots_quarantined += 1
            else:
                self._release_slot(turn, entry, rank)

    def hold(self, entry: BlockEntry) -> None:
        """Protect a ready block: neither evicted nor freed until unhold."""
        entry.holds += 1
        self.holds += 1
        if entry.evictable:
            self.index.refresh(entry)

    def unhold(self, turn: Turn, entry: BlockEntry) -> None:
        """Take one protection away. Frees a block that only it kept."""
        assert entry.holds > 0, f"no hold to take from {entry}"
        entry.holds -= 1
        self.holds -= 1
        if entry.holds:
            return
        if entry.linked:
            self.index.refresh(entry)
        else:
            self._release(turn, entry)

    def touch(self, entries: Iterable[BlockEntry]) -> None:
        """Note a use of ready blocks; the last one named is the most recent."""
        for entry in entries:
            self.allocator.warm(entry.extents, self.policy.touch(entry))

    def reset(self, turn: Turn, namespace: Namespace) -> int:
        """Drop all ready blocks of a namespace; answers how many could be found until now.

        Held ones go with their last hold. The pending ones have been aborted before.
        """
        found = self.index.of_namespace(namespace.namespace).values()
        ready = [entry for entry in found if entry.state is BlockState.READY]
        for entry in ready:
            self._forget(entry)
            if not entry.holds:
                self._release(turn, entry)
        return len(ready)

    def _seal(self, turn: Turn, entry: BlockEntry) -> None:
        namespace = self.namespaces.get(entry.key.namespace)
        # A reset aborts what is pending; were one to slip through, no byte of it may be found.
        assert entry.generation == namespace.generation, f"{entry} is of an old generation"
        entry.state = BlockState.READY
        self.pending -= 1
        namespace.blocks_ready += 1
        turn.ready.extend(entry.slots)
        self.touch((entry,))
        self.index.refresh(entry)

    def _evict(self, turn: Turn, entry: BlockEntry) -> None:
        """Free a victim that Eviction has taken out of the index."""
        self.policy.forget(entry)
        self.namespaces.get(entry.key.namespace).blocks_ready -= 1
        self.evicted += 1
        self._release(turn, entry)

    def _forget(self, entry: BlockEntry) -> None:
        self.index.unlink(entry)
        self.policy.forget(entry)
        self.namespaces.get(entry.key.namespace).blocks_ready -= 1

    @staticmethod
    def _close_shard(entry: BlockEntry, rank: int) -> None:
        assert entry.open >> rank & 1, f"no copy of rank {rank} is open on {entry}"
        entry.open &= ~(1 << rank)

    def _release(self, turn: Turn, entry: BlockEntry) -> None:
        """All slots of a block that no copy writes and nobody holds."""
        assert not entry.open, f"freed under a copy: {entry}"
        assert not entry.holds, f"freed while held: {entry}"
        assert entry.occupied == entry.ranks_all, f"freed twice: {entry}"
        entry.occupied = 0
        for slot in entry.slots:
            self.allocator.free(slot)
        namespace = self.namespaces.get(entry.key.namespace)
        namespace.bytes_used -= len(entry.slots) * entry.slot_bytes
        turn.freed.extend(entry.slots)

    def _release_slot(self, turn: Turn, entry: BlockEntry, rank: int) -> None:
        assert not entry.open >> rank & 1, f"a slot under a copy of rank {rank} is freed: {entry}"
        assert not entry.holds, f"the slot of rank {rank} is freed while held: {entry}"
        assert entry.occupied >> rank & 1, f"the slot of rank {rank} is freed twice: {entry}"
        entry.occupied &= ~(1 << rank)
        slot = entry.slots[rank]
        self.allocator.free(slot)
        self.namespaces.get(entry.key.namespace).bytes_used -= entry.slot_bytes
        turn.freed.append(slot)

"""Index: block key -> block entry, the children of every key, and what may be evicted.

Owns which entries can be found, and keeps the policy's set equal to its rule: a block
may go when it is in the index, ready, without a hold, and no block in the index names
it as its parent. Called by Blocks and Eviction on the loop thread. Frees nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.entry import BlockState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvoffd.core.entry import BlockEntry
    from kvoffd.core.policy.base import Policy
    from kvoffd.core.types import BlockKey, NamespaceId


class Index:
    """Findable blocks."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: dict[NamespaceId, dict[BlockKey, BlockEntry]] = {}
        # By parent key, whether the parent is here or not: it may come later.
        self._children: dict[BlockKey, set[BlockEntry]] = {}

    def get(self, key: BlockKey) -> BlockEntry | None:
        """The attempt that this key stands for now, pending or ready."""
        entries = self._entries.get(key.namespace)
        return entries.get(key) if entries is not None else None

    def of_namespace(self, namespace: NamespaceId) -> dict[BlockKey, BlockEntry]:
        """A copy: the caller may unlink as it goes."""
        return dict(self._entries.get(namespace, {}))

    def entries(self) -> Iterator[BlockEntry]:
        """All findable blocks."""
        for entries in self._entries.values():
            yield from entries.values()

    def parents(self) -> Iterator[BlockKey]:
        """All keys that have a child."""
        return iter(self._children)

    def children(self, key: BlockKey) -> frozenset[BlockEntry]:
        """The blocks in the index that name this key as their parent."""
        return frozenset(self._children.get(key, ()))

    def link(self, entry: BlockEntry) -> None:
        """Make an entry findable under its key, which is free."""
        entries = self._entries.setdefault(entry.key.namespace, {})
        assert entry.key not in entries, f"{entry} would hide {entries[entry.key]}"
        entries[entry.key] = entry
        entry.linked = True
        if entry.parent is not None:
            siblings = self._children.get(entry.parent)
            if siblings is None:
                self._children[entry.parent] = {entry}
                parent = entries.get(entry.parent)
                if parent is not None and parent.evictable:
                    self.refresh(parent)
            else:
                siblings.add(entry)
        if entry.state is BlockState.READY:
            self.refresh(entry)

    def unlink(self, entry: BlockEntry) -> None:
        """Make an entry unfindable; its parent may become evictable by that."""
        entries = self._entries[entry.key.namespace]
        assert entries.get(entry.key) is entry, f"{entry} is not in the index"
        del entries[entry.key]
        if not entries:
            del self._entries[entry.key.namespace]
        entry.linked = False
        if entry.evictable:
            entry.evictable = False
            self._policy.remove(entry)
        if entry.parent is not None:
            siblings = self._children[entry.parent]
            siblings.remove(entry)
            if not siblings:
                del self._children[entry.parent]
                parent = entries.get(entry.parent)
                if parent is not None:
                    self.refresh(parent)

    def refresh(self, entry: BlockEntry) -> None:
        """Tell the policy if the entry has become evictable, or is so no more."""
        evictable = self.may_go(entry)
        if evictable is not entry.evictable:
            entry.evictable = evictable
            if evictable:
                self._policy.add(entry)
            else:
                self._policy.remove(entry)

    def may_go(self, entry: BlockEntry) -> bool:
        """The rule of what may be evicted."""
        return (
            entry.linked
            and not entry.holds
            and entry.state is BlockState.READY
            and entry.key not in self._children
        )

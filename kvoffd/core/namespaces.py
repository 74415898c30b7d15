"""Namespaces: digest -> description, generation, and gauges of what each one keeps.

Owns the table of namespaces. Called by Cache and Blocks on the loop thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.types import NamespaceId, NamespaceView
from kvoffd.errors import BadRequest, NamespaceNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Of a namespace that was never reset. 0 is left for "no namespace" in slot records.
GENERATION_FIRST = 1


class Namespace:
    """One set within which equal hashes mean equal bytes."""

    __slots__ = (
        "blocks_ready",
        "bytes_used",
        "digest",
        "generation",
        "namespace",
        "ranks_total",
        "shard_bytes",
        "slot_bytes",
    )

    def __init__(
        self,
        namespace: NamespaceId,
        digest: bytes,
        ranks_total: int,
        shard_bytes: Mapping[int, int],
        slot_bytes: Mapping[int, int],
    ) -> None:
        self.namespace = namespace
        self.digest = digest
        self.ranks_total = ranks_total
        #: By group: bytes of one rank's shard, and of the slot for it.
        self.shard_bytes = dict(shard_bytes)
        self.slot_bytes = dict(slot_bytes)
        self.generation = GENERATION_FIRST
        self.blocks_ready = 0
        #: Of slots in use, whole slots, also of blocks that nobody can find any more.
        self.bytes_used = 0

    def view(self) -> NamespaceView:
        """What a caller may know."""
        return NamespaceView(
            namespace=self.namespace,
            digest=self.digest,
            ranks_total=self.ranks_total,
            generation=self.generation,
            blocks_ready=self.blocks_ready,
            bytes_used=self.bytes_used,
        )

    def require_group(self, group: int) -> None:
        """Raises BadRequest for a group that was not registered."""
        if group not in self.shard_bytes:
            raise BadRequest(
                f"Group {group} is not one of the namespace's {len(self.shard_bytes)}."
            )

    def require_rank(self, rank: int) -> None:
        """Raises BadRequest for a rank that the namespace does not have."""
        if not 0 <= rank < self.ranks_total:
            raise BadRequest(f"Rank {rank} is not below the namespace's {self.ranks_total} ranks.")


class Namespaces:
    """The table."""

    def __init__(self, extent_bytes: int, slot_align_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._slot_align_bytes = slot_align_bytes
        self._by_digest: dict[bytes, Namespace] = {}
        self._by_id: dict[NamespaceId, Namespace] = {}

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_id.values())

    def get(self, namespace: NamespaceId) -> Namespace:
        """Raises NamespaceNotFound."""
        found = self._by_id.get(namespace)
        if found is None:
            raise NamespaceNotFound(f"There is no namespace {namespace}.")
        return found

    def register(
        self, digest: bytes, ranks_total: int, shard_bytes: Mapping[int, int]
    ) -> Namespace:
        """Find or make a namespace. Raises BadRequest and changes nothing."""
        known = self._by_digest.get(digest)
        if known is not None:
            if known.ranks_total != ranks_total or known.shard_bytes != dict(shard_bytes):
                raise BadRequest(
                    f"Namespace {digest.hex()} was registered with {known.ranks_total} ranks and "
                    f"shards of {known.shard_bytes} bytes, now with {ranks_total} and "
                    f"{dict(shard_bytes)}."
                )
            return known
        if not digest:
            raise BadRequest("A namespace needs a digest.")
        if ranks_total < 1:
            raise BadRequest(f"A namespace has at least one rank, not {ranks_total}.")
        if not shard_bytes:
            raise BadRequest("A namespace needs at least one group.")
        slot_bytes = {group: self._slot_bytes(group, size) for group, size in shard_bytes.items()}
        namespace = Namespace(
            NamespaceId(len(self._by_id) + 1), digest, ranks_total, shard_bytes, slot_bytes
        )
        self._by_digest[digest] = namespace
        self._by_id[namespace.namespace] = namespace
        return namespace

    def _slot_bytes(self, group: int, shard_bytes: int) -> int:
        if group < 0:
            raise BadRequest(f"Group {group} is below zero.")
        if shard_bytes < 1:
            raise BadRequest(
                f"A shard of group {group} has {shard_bytes} bytes; at least 1 is due."
            )
        rounded = -(-shard_bytes // self._slot_align_bytes) * self._slot_align_bytes
        if rounded > self._extent_bytes:
            raise BadRequest(
                f"A shard of group {group} has {shard_bytes} bytes and does not fit into an extent "
                f"of {self._extent_bytes}; start the daemon with larger extents."
            )
        return rounded

"""Namespaces: from the fields that a client gave to the core's namespace, and its resets.

Owns the fields (the core keeps the digest alone) and the resets of namespaces that have
no rank yet. Runs on the loop thread. A generation is in the arena's table before anybody
is told of it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from kvoffd.core.namespaces import GENERATION_FIRST
from kvoffd.errors import NamespaceNotFound, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvoffd.arena.arena import Arena
    from kvoffd.core.cache import Cache
    from kvoffd.core.plans import Effects
    from kvoffd.core.types import NamespaceId, NamespaceView

Fields = tuple[tuple[str, str], ...]


class Reset(NamedTuple):
    """The answer to a reset."""

    generation: int
    blocks_dropped: int


class Namespaces:
    """All namespaces that a session has named since the start."""

    def __init__(
        self,
        cache: Cache,
        arena: Arena,
        apply: Callable[[Effects], None],
        namespaces_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._apply = apply
        self._namespaces_max = namespaces_max
        self._clock = clock
        self._fields: dict[bytes, Fields] = {}
        self._ids: dict[bytes, NamespaceId] = {}
        #: Resets before the first rank came, owed to the namespace at its registration:
        #: jobs that were decided before such a reset must find their generation stale.
        self._early_resets: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def digest(self, fields: Fields) -> bytes:
        """The identity of these fields, in whatever order they came. Raises Overloaded."""
        ordered = tuple(sorted(fields))
        digest = hashlib.sha256()
        for text in (text for pair in ordered for text in pair):
            encoded = text.encode()
            # The length goes first: no two different lists of fields look alike.
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        key = digest.digest()
        if key not in self._fields:
            if len(self._fields) >= self._namespaces_max:
                raise Overloaded(
                    f"There are {len(self._fields)} namespaces, as many as namespaces_max allows."
                )
            self._fields[key] = ordered
        return key

    def fields(self, digest: bytes) -> Fields:
        """By name."""
        return self._fields[digest]

    def register(self, digest: bytes, ranks_total: int, shard_bytes: Mapping[int, int]) -> None:
        """A rank describes its shards. Raises BadRequest when they are not as before."""
        view = self._cache.register_namespace(digest, ranks_total, shard_bytes)
        if digest in self._ids:
            return
        # Raises when the table is full: then nobody gets to know this namespace.
        self._write(view)
        for _ in range(self._early_resets.pop(digest, 0)):
            self._reset(view.namespace)
        self._ids[digest] = view.namespace

    def get(self, digest: bytes) -> NamespaceId | None:
        """None until the first rank has registered with it."""
        return self._ids.get(digest)

    def require(self, digest: bytes) -> NamespaceId:
        """Raises NamespaceNotFound until the first rank has registered with it."""
        found = self._ids.get(digest)
        if found is None:
            raise NamespaceNotFound("No rank has registered with this namespace yet.")
        return found

    def generation(self, digest: bytes) -> int:
        """What the next job has to name."""
        namespace = self._ids.get(digest)
        if namespace is None:
            return GENERATION_FIRST + self._early_resets.get(digest, 0)
        return self._cache.namespace(namespace).generation

    def reset(self, digest: bytes) -> Reset:
        """Nothing stored so far can be found from now on."""
        namespace = self._ids.get(digest)
        if namespace is None:
            self._early_resets[digest] = self._early_resets.get(digest, 0) + 1
            return Reset(self.generation(digest), 0)
        view, blocks_dropped = self._reset(namespace)
        return Reset(view.generation, blocks_dropped)

    def _reset(self, namespace: NamespaceId) -> tuple[NamespaceView, int]:
        result = self._cache.reset_namespace(namespace, self._clock())
        view = self._cache.namespace(namespace)
        self._write(view)
        self._apply(result.effects)
        return view, result.blocks_dropped

    def _write(self, view: NamespaceView) -> None:
        self._arena.write_namespace(view.namespace, view.digest, view.ranks_total, view.generation)

"""Leases: promises that blocks stay loadable until a deadline; and the loads they allow.

Owns both tables. Called by Cache alone, on the loop thread. It changes blocks only
through Blocks.

A lease holds its blocks, and so does every load: a lease may run out while a copy that
it allowed is still reading. A lease past its deadline is honoured until `expire` takes
it, because until then its blocks are in fact still held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.plans import LoadPlan, LookupResult
from kvoffd.core.types import LeaseId, LoadId
from kvoffd.errors import (
    BadRequest,
    JobConflict,
    LeaseNotFound,
    LoadNotFound,
    Overloaded,
    StaleGeneration,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvoffd.core.blocks import Blocks
    from kvoffd.core.entry import BlockEntry
    from kvoffd.core.namespaces import Namespace
    from kvoffd.core.turn import Turn
    from kvoffd.core.types import CacheOptions, InstanceKey


class Lease:
    """Exactly the blocks of one hit, in its order."""

    __slots__ = (
        "begun",
        "deadline_s",
        "ended",
        "entries",
        "generation",
        "instance",
        "lease_id",
        "namespace",
    )

    def __init__(
        self,
        lease_id: LeaseId,
        instance: InstanceKey,
        namespace: Namespace,
        entries: list[BlockEntry],
        deadline_s: float,
    ) -> None:
        self.lease_id = lease_id
        self.instance = instance
        self.namespace = namespace
        self.generation = namespace.generation
        self.entries = entries
        self.deadline_s = deadline_s
        #: Ranks that have begun their load, and that have ended it.
        self.begun: set[int] = set()
        self.ended: set[int] = set()


class Load:
    """One rank's copies out of the blocks of a lease, which it may outlive."""

    __slots__ = ("entries", "lease", "load_id", "rank")

    def __init__(self, load_id: LoadId, lease: Lease, rank: int, entries: list[BlockEntry]) -> None:
        self.load_id = load_id
        self.lease = lease
        self.rank = rank
        self.entries = entries


class Leases:
    """All leases and all loads in flight."""

    def __init__(self, options: CacheOptions, blocks: Blocks) -> None:
        self._options = options
        self._blocks = blocks
        # In the order of their deadlines: renew puts a lease at the end.
        self._leases: dict[LeaseId, Lease] = {}
        self._loads: dict[LoadId, Load] = {}
        self._lease_ids = 0
        self._load_ids = 0

    def leases(self) -> Iterator[Lease]:
        """The live ones; to be read only."""
        return iter(self._leases.values())

    def loads(self) -> Iterator[Load]:
        """Those in flight; to be read only."""
        return iter(self._loads.values())

    @property
    def leases_total(self) -> int:
        """Live leases."""
        return len(self._leases)

    @property
    def loads_total(self) -> int:
        """Loads in flight."""
        return len(self._loads)

    def leases_of(self, instance: InstanceKey) -> int:
        """Live leases of one instance."""
        return sum(lease.instance == instance for lease in self._leases.values())

    def grant(
        self,
        instance: InstanceKey,
        namespace: Namespace,
        entries: list[BlockEntry],
        now_s: float,
    ) -> LookupResult:
        """A lease over ready blocks. Raises Overloaded and changes nothing."""
        if len(self._leases) >= self._options.leases_max:
            raise Overloaded(f"There are {len(self._leases)} leases, as many as leases_max allows.")
        self._lease_ids += 1
        ttl_s = self._options.lease_ttl_s
        lease = Lease(LeaseId(self._lease_ids), instance, namespace, entries, now_s + ttl_s)
        self._leases[lease.lease_id] = lease
        for entry in entries:
            self._blocks.hold(entry)
        return LookupResult(len(entries), lease.lease_id, ttl_s)

    def renew(self, instance: InstanceKey, lease_id: LeaseId, now_s: float) -> float:
        """Prolong a lease; answers the time it has now. Raises LeaseNotFound."""
        lease = self._of(instance, lease_id)
        lease.deadline_s = now_s + self._options.lease_ttl_s
        del self._leases[lease_id]
        self._leases[lease_id] = lease
        return self._options.lease_ttl_s

    def release(self, turn: Turn, instance: InstanceKey, lease_ids: Iterable[LeaseId]) -> int:
        """Give leases back; answers how many there were, of this instance."""
        released = 0
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.instance == instance:
                self._end(turn, lease)
                released += 1
        return released

    def begin_load(
        self,
        instance: InstanceKey,
        lease_id: LeaseId,
        rank: int,
        skip_blocks: int,
        blocks: int,
        generation: int,
    ) -> LoadPlan:
        """Hold a part of a lease's blocks for one rank's copies. A failure changes nothing."""
        lease = self._of(instance, lease_id)
        current = lease.namespace.generation
        if generation != current or lease.generation != current:
            raise StaleGeneration(
                f"The load is of generation {generation} and its lease of {lease.generation}; "
                f"the namespace is at {current}."
            )
        lease.namespace.require_rank(rank)
        if skip_blocks < 0 or blocks < 1 or skip_blocks + blocks > len(lease.entries):
            raise BadRequest(
                f"Blocks {skip_blocks} to {skip_blocks + blocks} are not within the lease's "
                f"{len(lease.entries)}."
            )
        if rank in lease.begun:
            raise JobConflict(f"Rank {rank} has loaded from lease {lease_id} before.")
        lease.begun.add(rank)
        self._load_ids += 1
        entries = lease.entries[skip_blocks : skip_blocks + blocks]
        load = Load(LoadId(self._load_ids), lease, rank, entries)
        self._loads[load.load_id] = load
        for entry in entries:
            self._blocks.hold(entry)
        slots = tuple(entry.slots[rank] for entry in entries)
        return LoadPlan(load.load_id, slots, entries[0].length_bytes, entries[0].key.group)

    def end_load(self, turn: Turn, load_id: LoadId) -> Load:
        """Drop a load's holds; the last rank's end releases the lease. Raises LoadNotFound."""
        load = self._loads.pop(load_id, None)
        if load is None:
            raise LoadNotFound(f"Load {load_id} has ended, or never began.")
        for entry in load.entries:
            self._blocks.unhold(turn, entry)
        lease = load.lease
        lease.ended.add(load.rank)
        if lease.lease_id in self._leases and len(lease.ended) == lease.namespace.ranks_total:
            self._end(turn, lease)
        return load

    def expire(self, turn: Turn, now_s: float) -> None:
        """Take back the leases whose deadline has passed."""
        overdue: list[Lease] = []
        for lease in self._leases.values():
            if lease.deadline_s >= now_s:
                break
            overdue.append(lease)
        for lease in overdue:
            self._end(turn, lease)
            turn.expired_leases.append(lease.lease_id)

    def drop(self, turn: Turn, instance: InstanceKey) -> None:
        """Take back all leases of an instance that is gone."""
        for lease in [lease for lease in self._leases.values() if lease.instance == instance]:
            self._end(turn, lease)

    def _of(self, instance: InstanceKey, lease_id: LeaseId) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.instance != instance:
            raise LeaseNotFound(f"Lease {lease_id} never was, was released, or has expired.")
        return lease

    def _end(self, turn: Turn, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        for entry in lease.entries:
            self._blocks.unhold(turn, entry)

"""Cache: the single door of the core.

Owns the parts of the core and the counters of what passed the door. Runs on the loop
thread. It does no I/O and knows no clock: every call that needs the time is given it,
and answers with what is to be done, as an immutable plan. `now_s` never runs backwards.

A call that raises has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvoffd.core import invariants
from kvoffd.core.blocks import Blocks
from kvoffd.core.entry import BlockState
from kvoffd.core.jobs import StoreRequest
from kvoffd.core.leases import Leases
from kvoffd.core.plans import LookupResult, ResetResult
from kvoffd.core.stores import Stores
from kvoffd.core.turn import Turn
from kvoffd.core.types import BlockKey, CacheStatistics
from kvoffd.errors import BadRequest, StaleGeneration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvoffd.core.entry import BlockEntry
    from kvoffd.core.ledger import Ledger
    from kvoffd.core.plans import Effects, LoadPlan
    from kvoffd.core.policy.base import Policy
    from kvoffd.core.types import (
        CacheOptions,
        InstanceKey,
        JobRef,
        LeaseId,
        LoadId,
        NamespaceId,
        NamespaceView,
        SlotId,
        StoreId,
        UnstoredReason,
    )


class Cache:
    """Which blocks there are, where they lie, and who may touch them."""

    # Parts that a variant of the cache may replace.
    blocks_type: ClassVar[type[Blocks]] = Blocks
    stores_type: ClassVar[type[Stores]] = Stores
    leases_type: ClassVar[type[Leases]] = Leases

    def __init__(self, options: CacheOptions, policy: Policy) -> None:
        if options.slot_align_bytes < 1 or options.extent_bytes % options.slot_align_bytes:
            raise BadRequest(
                f"Extents of {options.extent_bytes} bytes are not a multiple of "
                f"{options.slot_align_bytes} bytes."
            )
        if min(options.extents_total, options.extent_bytes) < 1:
            raise BadRequest("A cache needs at least one extent of at least one byte.")
        self._blocks = self.blocks_type(options, policy)
        self._stores = self.stores_type(options, self._blocks)
        self._leases = self.leases_type(options, self._blocks)
        self._lookups = 0
        self._lookup_blocks = 0
        self._lookup_hit_blocks = 0
        self._loaded_blocks = 0
        self._failed_load_blocks = 0

    def register_namespace(
        self, digest: bytes, ranks_total: int, shard_bytes: Mapping[int, int]
    ) -> NamespaceView:
        """Find or make a namespace; shard_bytes: of one rank's shard, by group.

        Raises:
            BadRequest: it is described differently than before, or a shard is larger
                than an extent.
        """
        return self._blocks.namespaces.register(digest, ranks_total, shard_bytes).view()

    def namespace(self, namespace: NamespaceId) -> NamespaceView:
        """Raises NamespaceNotFound."""
        return self._blocks.namespaces.get(namespace).view()

    def namespaces(self) -> tuple[NamespaceView, ...]:
        """All of them."""
        return tuple(namespace.view() for namespace in self._blocks.namespaces)

    def reset_namespace(self, namespace: NamespaceId, now_s: float) -> ResetResult:
        """Begin a new generation: no block of the older ones can be found from now on.

        Ready blocks are freed at once, held ones with their last hold. Undecided blocks
        of jobs fail at once for all ranks; slots under a copy are freed when it is closed.

        Raises:
            NamespaceNotFound: there is none.
        """
        del now_s
        found = self._blocks.namespaces.get(namespace)
        turn = Turn()
        self._stores.reset(turn, found)
        dropped = self._blocks.reset(turn, found)
        found.generation += 1
        return ResetResult(found.generation, dropped, self._finish(turn))

    def begin_store(
        self,
        job: JobRef,
        rank: int,
        namespace: NamespaceId,
        generation: int,
        group: int,
        parent_hash: bytes | None,
        hashes: Sequence[bytes],
        now_s: float,
        refusal: UnstoredReason | None = None,
    ) -> Effects:
        """One rank begins a job. The first one's begin decides for all ranks.

        With a refusal, a job that no rank has begun yet is rejected for that reason, and
        counted; one that has been begun goes on, so that all ranks hear the same.

        Raises:
            BadRequest: no such group or rank, no blocks, or one block twice.
            JobConflict: this rank has begun the job, or another one with other blocks.
            NamespaceNotFound: there is none.
        """
        found = self._blocks.namespaces.get(namespace)
        request = StoreRequest(
            job, rank, found, generation, group, parent_hash or None, tuple(hashes)
        )
        turn = Turn()
        self._stores.begin(turn, request, refusal, now_s)
        return self._finish(turn)

    def commit_store(self, store_id: StoreId, now_s: float) -> Effects:
        """A rank's copies of one plan have really ended, and well.

        The last rank's commit makes a block ready. Of a block that was aborted meanwhile
        the slot is freed, and nothing else happens.

        Raises:
            StoreNotFound: it has ended, or never began.
        """
        del now_s
        turn = Turn()
        self._stores.commit(turn, store_id)
        return self._finish(turn)

    def abort_store(self, store_id: StoreId, reason: UnstoredReason, now_s: float) -> Effects:
        """A rank's copies of one plan have really ended badly, or will certainly never begin.

        Its blocks are aborted for all ranks. This rank's slots are free from now on; a
        slot of another rank whose copy may still run is freed when that is closed.

        Raises:
            StoreNotFound: it has ended, or never began.
        """
        del now_s
        turn = Turn()
        self._stores.abort(turn, store_id, reason)
        return self._finish(turn)

    def revoke_job(self, job: JobRef, reason: UnstoredReason, now_s: float) -> Effects:
        """The engine takes a job back: nothing unsealed of it will ever be found.

        Its open stores come back in `cancelled` and have to be closed all the same. A job
        that is unknown or decided has nothing to revoke; that is no failure.
        """
        del now_s
        turn = Turn()
        self._stores.revoke(turn, job, reason)
        return self._finish(turn)

    def lookup(
        self,
        instance: InstanceKey,
        namespace: NamespaceId,
        generation: int,
        group: int,
        hashes: Iterable[bytes],
        now_s: float,
    ) -> LookupResult:
        """How many leading blocks are ready, and a lease over them.

        Takes hashes only as far as the first miss.

        Raises:
            BadRequest: no such group.
            NamespaceNotFound: there is none.
            Overloaded: leases_max is reached.
            StaleGeneration: the namespace has been reset since.
        """
        found = self._blocks.namespaces.get(namespace)
        found.require_group(group)
        if generation != found.generation:
            raise StaleGeneration(
                f"The lookup is of generation {generation}; the namespace is at {found.generation}."
            )
        get = self._blocks.index.get
        entries: list[BlockEntry] = []
        asked = 0
        for block_hash in hashes:
            asked += 1
            entry = get(BlockKey(namespace, group, block_hash))
            if entry is None or entry.state is not BlockState.READY:
                break
            entries.append(entry)
        result = LookupResult(0)
        if entries:
            result = self._leases.grant(instance, found, entries, now_s)
            # The tail first, so that the head is the most recent.
            self._blocks.touch(reversed(entries))
        self._lookups += 1
        self._lookup_blocks += asked
        self._lookup_hit_blocks += len(entries)
        return result

    def renew(self, instance: InstanceKey, lease_id: LeaseId, now_s: float) -> float:
        """Prolong a lease; answers the seconds it has now. Raises LeaseNotFound."""
        return self._leases.renew(instance, lease_id, now_s)

    def release(
        self, instance: InstanceKey, lease_ids: Iterable[LeaseId], now_s: float
    ) -> tuple[int, Effects]:
        """Give leases back; answers how many there were. Another instance's are not found."""
        del now_s
        turn = Turn()
        released = self._leases.release(turn, instance, lease_ids)
        return released, self._finish(turn)

    def begin_load(
        self,
        instance: InstanceKey,
        lease_id: LeaseId,
        rank: int,
        skip_blocks: int,
        blocks: int,
        generation: int,
        now_s: float,
    ) -> LoadPlan:
        """One rank's slots of a lease's blocks, with a hold of their own until end_load.

        Raises:
            BadRequest: no such rank, or not so many blocks.
            JobConflict: the rank has loaded from this lease before.
            LeaseNotFound: released, expired, or another instance's.
            StaleGeneration: the namespace has been reset since.
        """
        del now_s
        return self._leases.begin_load(instance, lease_id, rank, skip_blocks, blocks, generation)

    def end_load(self, load_id: LoadId, loaded: bool, now_s: float) -> tuple[bool, Effects]:
        """A rank's copies have really ended; the last rank's end releases the lease.

        Answers whether the bytes may be used: the copies went well, and the namespace was
        not reset under them.

        Raises:
            LoadNotFound: it has ended, or never began.
        """
        del now_s
        turn = Turn()
        load = self._leases.end_load(turn, load_id)
        good = loaded and load.lease.generation == load.lease.namespace.generation
        if good:
            self._loaded_blocks += len(load.entries)
        else:
            self._failed_load_blocks += len(load.entries)
        return good, self._finish(turn)

    def expire(self, now_s: float) -> Effects:
        """Take back leases, and give up blocks, whose deadline lies before now."""
        turn = Turn()
        self._leases.expire(turn, now_s)
        self._stores.expire(turn, now_s)
        return self._finish(turn)

    def drop_instance(self, instance: InstanceKey, now_s: float) -> Effects:
        """An instance is gone: its leases and unsealed blocks are given up, its jobs forgotten.

        Its open stores and loads stay until each is closed, because copies may still run.
        Its ledger goes into the total.
        """
        del now_s
        turn = Turn()
        self._leases.drop(turn, instance)
        self._stores.drop(turn, instance)
        return self._finish(turn)

    def slot_offset_bytes(self, slot: SlotId) -> int:
        """Where a slot that a plan names begins in the arena's data."""
        return self._blocks.allocator.slot_offset_bytes(slot)

    def ledger(self, instance: InstanceKey) -> Ledger:
        """One living instance's account, in blocks times ranks; all zero if it is unknown."""
        return self._stores.ledgers.ledger(instance)

    def ledger_total(self) -> Ledger:
        """The account of all instances since the start."""
        return self._stores.ledgers.total()

    def leases_of(self, instance: InstanceKey) -> int:
        """Live leases of one instance; none if it is unknown."""
        return self._leases.leases_of(instance)

    def statistics(self) -> CacheStatistics:
        """Counters and gauges."""
        blocks = self._blocks
        return CacheStatistics(
            blocks_ready=sum(namespace.blocks_ready for namespace in blocks.namespaces),
            blocks_pending=blocks.pending,
            slots_used=blocks.allocator.slots_used,
            slots_quarantined=blocks.slots_quarantined,
            bytes_used=blocks.allocator.bytes_used,
            extents_used=blocks.allocator.extents_used,
            leases=self._leases.leases_total,
            holds=blocks.holds,
            loads_in_flight=self._leases.loads_total,
            jobs_open=self._stores.jobs_open,
            lookups=self._lookups,
            lookup_blocks=self._lookup_blocks,
            lookup_hit_blocks=self._lookup_hit_blocks,
            evicted_blocks=blocks.evicted,
            loaded_blocks=self._loaded_blocks,
            failed_load_blocks=self._failed_load_blocks,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError with the facts. Reads all there is: for tests and idle times."""
        invariants.check(self._blocks, self._stores, self._leases)

    def _finish(self, turn: Turn) -> Effects:
        self._stores.finish(turn)
        return turn.effects(self._blocks.allocator.take_class_changes())

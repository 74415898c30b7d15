"""The machine finds what it is there to find: each fault below is seeded, and must be caught.

Only the oracle judges here: check_invariants is switched off, so that a fault is caught by
what a caller can see (a wrong byte, a wrong answer, a slot that never comes back), or by
an assertion of the core itself. The faults:

 1. eviction ignores holds                     10. a slot is freed before its copy has ended
 2. an abort leaks the slots it should free    11. a store evicts its own blocks' parent
 3. a load has no hold of its own              12. a block that finds no room has evicted one
 4. a rank may begin a job twice               13. an overdue block is not given up
 5. a job's commit after its revoke seals      14. another instance may use a lease
 6. the generation is not checked at commit    15. a late rank hears another verdict
 7. a block is ready before all its ranks      16. a load of an old generation is called good
 8. a head is evicted before its tail          17. an extent with a held block is reclaimed
 9. a waiter is never promoted                 18. a dead engine's leases stay
"""

from __future__ import annotations

import pytest
from core.cache_machine import CacheMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvoffd.core.blocks import Blocks
from kvoffd.core.cache import Cache
from kvoffd.core.entry import BlockState
from kvoffd.core.eviction import Eviction
from kvoffd.core.index import Index
from kvoffd.core.leases import Leases
from kvoffd.core.stores import Stores
from kvoffd.core.turn import Turn

# No shrinking: what is asked is whether a fault is found, not its smallest program.
SEARCH = settings(
    max_examples=2000,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class HoldsIgnored(Blocks):
    """Fault 1: nothing is protected."""

    def hold(self, entry):
        """Counts nothing."""

    def unhold(self, turn, entry):
        """Takes nothing."""


class AbortLeaks(Blocks):
    """Fault 2: slots are kept for ever."""

    def _release_slot(self, turn, entry, rank):
        """Keeps it."""


class NoHoldOfLoad(Leases):
    """Fault 3: only the lease protects."""

    def begin_load(self, *args):
        plan = super().begin_load(*args)
        for entry in self._loads[plan.load_id].entries:
            self._blocks.unhold(Turn(), entry)
        return plan

    def end_load(self, turn, load_id):
        if load_id in self._loads:
            self._loads[load_id].entries = []
        return super().end_load(turn, load_id)


class TwiceBegun(Stores):
    """Fault 4: the first begin is forgotten."""

    def begin(self, turn, request, refusal, now_s):
        job = self._jobs.get(request.job)
        if job is not None:
            job.begun.discard(request.rank)
        super().begin(turn, request, refusal, now_s)


class RevokedCommitSeals(Blocks):
    """Fault 5: an aborted block whose copies all end well is brought back."""

    def abort(self, turn, entry):
        if entry.open == entry.ranks_all:
            entry.state = BlockState.ABORTED
            self.slots_quarantined += len(entry.slots)
            self.pending -= 1
            self.index.unlink(entry)
        else:
            super().abort(turn, entry)

    def commit_shard(self, turn, entry, rank):
        if entry.state is BlockState.ABORTED and entry.occupied == entry.ranks_all:
            self._close_shard(entry, rank)
            self.slots_quarantined -= 1
            entry.committed |= 1 << rank
            current = self.namespaces.get(entry.key.namespace).generation == entry.generation
            free = current and self.index.get(entry.key) is None
            if entry.committed == entry.ranks_all and free:
                self.pending += 1
                self.index.link(entry)
                self._seal(turn, entry)
            return False
        return super().commit_shard(turn, entry, rank)


class GenerationUnchecked(Stores):
    """Fault 6: a reset leaves pending blocks alone."""

    def reset(self, turn, namespace):
        """Lets the pending blocks live."""


class GenerationUncheckedBlocks(Blocks):
    """Fault 6: the seal looks at no generation."""

    def _seal(self, turn, entry):
        entry.generation = self.namespaces.get(entry.key.namespace).generation
        super()._seal(turn, entry)


class ReadyTooEarly(Blocks):
    """Fault 7: the first commit seals."""

    def commit_shard(self, turn, entry, rank):
        if entry.state is BlockState.READY:
            self._close_shard(entry, rank)
            return False
        if entry.state is BlockState.PENDING:
            entry.committed = entry.ranks_all & ~(1 << rank)
        return super().commit_shard(turn, entry, rank)


class HeadFirstIndex(Index):
    """Fault 8: children do not count."""

    def may_go(self, entry):
        return entry.linked and not entry.holds and entry.state is BlockState.READY


class HeadFirst(Blocks):
    """Fault 8: an index that does not count children."""

    def __init__(self, options, policy):
        super().__init__(options, policy)
        self.index = HeadFirstIndex(policy)
        self._eviction = Eviction(self.index, self.allocator, policy)


class NeverPromoted(Stores):
    """Fault 9: waiters are left waiting."""

    def _promote(self, turn, waiters):
        """Leaves them waiting."""


class FreedUnderCopy(Blocks):
    """Fault 10: an abort frees all slots at once."""

    def abort(self, turn, entry):
        entry.open = 0
        super().abort(turn, entry)

    def commit_shard(self, turn, entry, rank):
        if entry.state is BlockState.ABORTED:
            return False
        return super().commit_shard(turn, entry, rank)

    def abort_shard(self, turn, entry, rank):
        if entry.state is not BlockState.ABORTED:
            super().abort_shard(turn, entry, rank)


class ParentUnprotected(Stores):
    """Fault 11: the block before the first is fair game."""

    def _protect_parent(self, turn, job):
        """Protects nothing."""


class HalfDone(Eviction):
    """Fault 12: failing to make room still takes one block out."""

    def make_room(self, turn, slot_bytes, slots):
        victims = super().make_room(turn, slot_bytes, slots)
        coldest = self._policy.coldest(slot_bytes)
        if victims is None and coldest is not None:
            self._index.unlink(coldest)
        return victims


class NotAllOrNothing(Blocks):
    """Fault 12: what was chosen is not put back."""

    def __init__(self, options, policy):
        super().__init__(options, policy)
        self._eviction = HalfDone(self.index, self.allocator, policy)


class NoDeadline(Stores):
    """Fault 13: nothing is overdue."""

    def expire(self, turn, now_s):
        """Gives nothing up."""


class AnybodysLease(Leases):
    """Fault 14: the owner is not checked."""

    def _of(self, instance, lease_id):
        lease = self._leases.get(lease_id)
        return super()._of(lease.instance if lease else instance, lease_id)


class OtherVerdict(Stores):
    """Fault 15: a decided job is forgotten at once."""

    def _settle(self, turn, job):
        super()._settle(turn, job)
        self._remembered.pop(job.ref, None)


class AlwaysGood(Leases):
    """Fault 16: the generation is not checked at the end."""

    def end_load(self, turn, load_id):
        load = super().end_load(turn, load_id)
        load.lease.generation = load.lease.namespace.generation
        return load


class RecklessEviction(Eviction):
    """Fault 17: holds and descendants do not count."""

    def _sweep(self, extent, _limit, chosen):
        victims = {
            entry
            for entry in extent.used.values()
            if entry.linked and entry.state is BlockState.READY
        }
        return sorted(victims - set(chosen), key=lambda entry: entry.sequence)


class RecklessReclaim(Blocks):
    """Fault 17: extents are swept without a look."""

    def __init__(self, options, policy):
        super().__init__(options, policy)
        self._eviction = RecklessEviction(self.index, self.allocator, policy)


class LeasesStay(Leases):
    """Fault 18: death takes no lease back."""

    def drop(self, turn, instance):
        """Takes nothing back."""


FAULTS = {
    "eviction ignores holds": {"blocks_type": HoldsIgnored},
    "an abort leaks slots": {"blocks_type": AbortLeaks},
    "a load has no hold of its own": {"leases_type": NoHoldOfLoad},
    "a rank may begin a job twice": {"stores_type": TwiceBegun},
    "a commit after revoke seals": {"blocks_type": RevokedCommitSeals},
    "the generation is not checked at commit": {
        "blocks_type": GenerationUncheckedBlocks,
        "stores_type": GenerationUnchecked,
    },
    "ready before all ranks": {"blocks_type": ReadyTooEarly},
    "a head is evicted before its tail": {"blocks_type": HeadFirst},
    "a waiter is never promoted": {"stores_type": NeverPromoted},
    "freed before the copy has ended": {"blocks_type": FreedUnderCopy},
    "a store evicts its own parent": {"stores_type": ParentUnprotected},
    "no room, and still evicted": {"blocks_type": NotAllOrNothing},
    "an overdue block is not given up": {"stores_type": NoDeadline},
    "another instance may use a lease": {"leases_type": AnybodysLease},
    "a late rank hears another verdict": {"stores_type": OtherVerdict},
    "an old load is called good": {"leases_type": AlwaysGood},
    "an extent with a held block is reclaimed": {"blocks_type": RecklessReclaim},
    "a dead engine's leases stay": {"leases_type": LeasesStay},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_catches_a_seeded(fault):
    """Each fault makes some program fail, by what a caller sees or by the core's own assert."""
    broken = type("BrokenCache", (Cache,), FAULTS[fault])
    machine = type(
        "BrokenMachine", (CacheMachine,), {"cache_type": broken, "checks_invariants": False}
    )
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=SEARCH)

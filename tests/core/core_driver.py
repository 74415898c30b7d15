"""A cache and the shortest way to drive it, for tests of one rule each."""

from __future__ import annotations

import pytest

from kvoffd.core.cache import Cache
from kvoffd.core.plans import Effects
from kvoffd.core.policy.lru import LruPolicy
from kvoffd.core.types import CacheOptions, InstanceKey, JobRef

ENGINE = InstanceKey("engine")
RIVAL = InstanceKey("rival")


class Driver:
    """One namespace of two ranks (group 0: 128 bytes; group 1: 256), and room for little."""

    def __init__(self, extents_total=2, ranks_total=2, open_jobs_max=8, leases_max=8):
        options = CacheOptions(
            extents_total=extents_total,
            extent_bytes=512,
            slot_align_bytes=64,
            lease_ttl_s=10.0,
            store_deadline_s=30.0,
            leases_max=leases_max,
            open_jobs_max=open_jobs_max,
        )
        self.cache = Cache(options, LruPolicy())
        self.ranks_total = ranks_total
        view = self.cache.register_namespace(b"model", ranks_total, {0: 128, 1: 256})
        self.namespace = view.namespace
        self.now_s = 0.0
        self.jobs = 0

    def job(self, instance=ENGINE):
        """A new job's name."""
        self.jobs += 1
        return JobRef(instance, self.jobs)

    def begin(self, path, start=0, rank=0, job=None, group=0, generation=1, **more):
        """Begin to store the blocks of a path from `start`; each letter is a block."""
        hashes = [path[: end + 1].encode() for end in range(start, len(path))]
        return self.cache.begin_store(
            job or self.job(),
            rank,
            self.namespace,
            generation,
            group,
            path[:start].encode(),
            hashes,
            self.now_s,
            **more,
        )

    def commit(self, *effects):
        """All copies of these effects end well; answers the last call's effects."""
        done = Effects()
        for effect in effects:
            for plan in effect.stores:
                done = self.cache.commit_store(plan.store_id, self.now_s)
        return done

    def store(self, path, start=0, group=0):
        """Store on all ranks, to the end."""
        job = self.job()
        begun = [self.begin(path, start, rank, job, group) for rank in range(self.ranks_total)]
        return self.commit(*begun)

    def lookup(self, path, instance=ENGINE, group=0, generation=1):
        """The lookup of a path."""
        hashes = [path[: end + 1].encode() for end in range(len(path))]
        return self.cache.lookup(instance, self.namespace, generation, group, hashes, self.now_s)

    def hits(self, path, group=0, generation=1):
        """Leading blocks that are found; the lease is given back."""
        result = self.lookup(path, group=group, generation=generation)
        if result.lease_id is not None:
            self.cache.release(ENGINE, [result.lease_id], self.now_s)
        return result.hit_blocks

    def load(self, lease_id, rank=0, skip_blocks=0, blocks=1, instance=ENGINE, generation=1):
        """Begin a load."""
        return self.cache.begin_load(
            instance, lease_id, rank, skip_blocks, blocks, generation, self.now_s
        )


@pytest.fixture
def driver():
    """A cache for four blocks of group 0; its invariants are checked when the test ends."""
    made = Driver()
    yield made
    made.cache.check_invariants()


def reasons(effects):
    """What the jobs that settled in these effects could not store."""
    return [dict(settled.unstored) for settled in effects.settled]

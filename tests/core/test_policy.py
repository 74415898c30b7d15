"""Policies: who goes next, without a search."""

import random

import pytest

from kvoffd.core.entry import BlockEntry
from kvoffd.core.policy.base import Policy
from kvoffd.core.policy.lru import STALE_HEAP_SLACK, LruPolicy
from kvoffd.core.types import BlockKey, InstanceKey, JobRef, NamespaceId


def block(number, slot_bytes=64):
    """A block that the policy treats as opaque."""
    key = BlockKey(NamespaceId(1), 0, number.to_bytes(4, "big"))
    return BlockEntry(key, None, 1, number, 64, slot_bytes, JobRef(InstanceKey("e"), 1), 0)


@pytest.fixture
def policy() -> Policy:
    """The protocol's implementation under test."""
    return LruPolicy()


def test_the_coldest_of_a_size_is_the_one_used_longest_ago(policy):
    """Each slot size has its own order."""
    small, other, large = block(1), block(2), block(3, slot_bytes=128)
    for entry in (small, other, large):
        policy.touch(entry)
        policy.add(entry)
    assert policy.coldest(64) is small
    assert policy.coldest(128) is large
    policy.touch(small)
    assert policy.coldest(64) is other
    assert policy.recency(small) > policy.recency(large)
    policy.remove(large)
    policy.forget(large)
    assert policy.coldest(128) is None
    assert set(policy.known()) == {small, other}


def test_it_agrees_with_a_sorted_list_over_a_long_life(policy):
    """It is asked seldom here, so that its heap fills with stale entries and is made anew."""
    rng = random.Random(7)
    blocks = [block(number) for number in range(8)]
    recency: dict[BlockEntry, int] = {}
    members: set[BlockEntry] = set()
    for entry in blocks:
        recency[entry] = policy.touch(entry)
    for step in range(8 * STALE_HEAP_SLACK):
        entry = rng.choice(blocks)
        if entry in members and rng.random() < 0.5:
            policy.remove(entry)
            members.remove(entry)
        elif entry in members:
            recency[entry] = policy.touch(entry)
        else:
            policy.add(entry)
            members.add(entry)
        if step % 500 == 0:
            assert policy.coldest(64) is min(members, key=recency.get, default=None)
        assert set(policy.evictable()) == members

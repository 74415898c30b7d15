"""Namespaces: what must agree for equal hashes to mean equal bytes."""

import dataclasses

import pytest
from core.cache_oracle import OPTIONS

from kvoffd.core.cache import Cache
from kvoffd.core.policy.lru import LruPolicy
from kvoffd.core.types import NamespaceId
from kvoffd.errors import BadRequest, NamespaceNotFound


@pytest.fixture
def cache():
    """An empty cache."""
    return Cache(OPTIONS, LruPolicy())


def test_registering_again_finds_the_same(cache):
    """Every rank and every restart of an engine registers."""
    view = cache.register_namespace(b"x", 2, {0: 100})
    assert cache.register_namespace(b"x", 2, {0: 100}) == view
    assert cache.namespaces() == (view,)
    assert cache.namespace(view.namespace) == view
    assert (view.generation, view.blocks_ready, view.bytes_used) == (1, 0, 0)


@pytest.mark.parametrize(
    ("digest", "ranks_total", "shard_bytes"),
    [
        (b"x", 3, {0: 100}),
        (b"x", 2, {0: 101}),
        (b"", 2, {0: 100}),
        (b"y", 0, {0: 100}),
        (b"y", 2, {}),
        (b"y", 2, {0: 0}),
        (b"y", 2, {-1: 100}),
        (b"y", 2, {0: 100, 1: OPTIONS.extent_bytes + 1}),
    ],
)
def test_a_bad_description_is_refused(cache, digest, ranks_total, shard_bytes):
    """One that contradicts an older one, is empty, or fits into no extent."""
    view = cache.register_namespace(b"x", 2, {0: 100})
    with pytest.raises(BadRequest, match=r"\.$"):
        cache.register_namespace(digest, ranks_total, shard_bytes)
    assert cache.namespaces() == (view,)


def test_an_unknown_namespace_is_not_found(cache):
    """Ids mean nothing outside one process."""
    with pytest.raises(NamespaceNotFound):
        cache.namespace(NamespaceId(1))
    with pytest.raises(NamespaceNotFound):
        cache.reset_namespace(NamespaceId(1), 0.0)


@pytest.mark.parametrize(
    "bad", [{"slot_align_bytes": 0}, {"extent_bytes": 1000}, {"extents_total": 0}]
)
def test_sizes_that_do_not_fit_are_refused(bad):
    """Slots must fill an extent in whole steps of the alignment."""
    with pytest.raises(BadRequest):
        Cache(dataclasses.replace(OPTIONS, **bad), LruPolicy())

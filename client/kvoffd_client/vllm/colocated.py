"""Rank halves that share their process and thread with the scheduler half.

Owned by the engine's one thread. An in-process engine makes no step after the last
output, so a store decided when a request ends would wait for the next request, whose
blocks may be the very ones; next to its only rank the scheduler hands it over at once.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from kvoffd_client.engine.rank import RankHalf

_halves: WeakValueDictionary[tuple[str, str, int], RankHalf] = WeakValueDictionary()


def announce(instance_id: str, nonce: str, half: RankHalf) -> None:
    """A rank half works on this thread, for an instance of one rank."""
    _halves[instance_id, nonce, threading.get_ident()] = half


def find(instance_id: str, nonce: str) -> RankHalf | None:
    """The rank half of this instance on this very thread, if there is one."""
    return _halves.get((instance_id, nonce, threading.get_ident()))

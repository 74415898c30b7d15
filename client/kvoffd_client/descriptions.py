"""What an engine says of itself when a session is made. Plain values, on any thread."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd_client.memory import SharedMemory


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Where the daemon is and how long to wait for it. Times are of the background thread."""

    socket_path: str
    handshake_timeout_s: float = 5.0
    # The daemon maps the pool meanwhile, which takes its time with large ones.
    register_timeout_s: float = 60.0
    # None: three of the daemon's heartbeat times, at least ten seconds: beside ranks that spin on
    # every core a heartbeat takes over three, and every session lost for that loses its stores.
    heartbeat_timeout_s: float | None = None
    write_timeout_s: float = 5.0
    lookup_timeout_s: float = 5.0
    reset_timeout_s: float = 5.0
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    # While nobody listens a try is one system call, and the daemon is to be back soon.
    backoff_absent_max_s: float = 1.5
    refused_retry_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    # In [0, 1): many engines that lost one daemon must not come back in step.
    jitter: Callable[[], float] = random.random  # noqa: S311 - spreads tries


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What a session is a part of; equal in all processes of one start of an engine.

    `nonce` is made with the configuration of that start. `namespace` names the
    set in which equal hashes mean equal bytes; any difference is another set.
    """

    instance_id: str
    nonce: str
    namespace: tuple[tuple[str, str], ...]
    ranks_total: int


@dataclass(frozen=True, slots=True)
class RegionDescription:
    """Blocks of `block_bytes` each `block_stride_bytes` from `offset_bytes` of a memory on."""

    group: int
    memory_index: int
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class RankDescription:
    """A rank's pool. `memories` stay open as long as the session; regions index into them."""

    rank: int
    device: str
    pool_blocks: int
    memories: tuple[SharedMemory, ...]
    regions: tuple[RegionDescription, ...]

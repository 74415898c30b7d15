"""Builds the daemon, and starts, drains and stops it in order.

Owns the order alone; runs on the loop thread. Reads no configuration: kvoffd.main
hands values in.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kvoffd import __version__
from kvoffd.arena.arena import Arena, ArenaOptions
from kvoffd.copier.supervisor import Copier, CopierOptions
from kvoffd.core.cache import Cache
from kvoffd.core.policy.lru import LruPolicy
from kvoffd.core.types import CacheOptions
from kvoffd.rpc.admin import AdminServicer
from kvoffd.rpc.handshake import HandshakeServer
from kvoffd.rpc.lock import SocketLock
from kvoffd.rpc.offload import OffloadServicer
from kvoffd.rpc.server import RpcServer
from kvoffd.service.admin import AdminService
from kvoffd.service.copiers import Copiers
from kvoffd.service.fence import FenceService
from kvoffd.service.instances import Instances
from kvoffd.service.janitor import Janitor
from kvoffd.service.load import LoadService
from kvoffd.service.lookup import LookupService
from kvoffd.service.namespaces import Namespaces
from kvoffd.service.options import ServiceOptions
from kvoffd.service.sessions import Sessions
from kvoffd.service.store import StoreService
from kvoffd.service.transfer import TransferService

if TYPE_CHECKING:
    from kvoffd.copier.supervisor import CopierEvents
    from kvoffd.core.types import InstanceKey
    from kvoffd.rpc.options import RpcOptions
    from kvoffd.service.instances import Instance

log = structlog.get_logger(__name__)

#: How often a drain looks whether it is done.
DRAIN_LOOK_S = 0.02
#: For calls that are running when the server stops; their sessions are closed already.
CALLS_GRACE_S = 0.5
#: For pools to be unmapped, before the copiers are ended anyway.
POOLS_CLOSED_S = 5.0


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """All that a daemon is made of, as plain values."""

    rpc: RpcOptions
    service: ServiceOptions = field(default_factory=ServiceOptions)
    #: Bytes of the arena's data; a multiple of extent_bytes.
    arena_bytes: int = 1 << 30
    extent_bytes: int = 64 << 20
    #: Slots are multiples of this.
    slot_align_bytes: int = 4096
    #: One copier process each.
    devices: tuple[str, ...] = ("cpu:0",)
    copier_start_timeout_s: float = 30.0
    copier_ping_timeout_s: float = 10.0
    #: How long a drain waits for running jobs before it gives up on them.
    drain_timeout_s: float = 10.0


class Daemon:
    """One running daemon: start once, then drain, then stop."""

    def __init__(self, options: DaemonOptions) -> None:
        self._options = options
        self._lock = SocketLock(options.rpc)
        self._arena: Arena | None = None
        self._parts: _Parts | None = None

    async def start(self) -> None:
        """Serves when it returns.

        Raises:
            ArenaFailed, CopyFailed, SocketTaken, OSError: nothing is left behind.
        """
        try:
            self._lock.take()
            self._arena = _make_arena(self._options)
            self._parts = _Parts(self._options, self._arena)
            await self._parts.start()
        except BaseException:
            await self.stop()
            raise
        log.info(
            "serving",
            version=__version__,
            socket=self._options.rpc.socket,
            arena_bytes=self._arena.size_bytes,
            devices=self._options.devices,
            boot_id=self._parts.boot_id.hex(),
        )

    async def drain(self) -> None:
        """Admits nothing new and waits for running jobs, at most drain_timeout_s."""
        if self._parts is not None:
            await self._parts.drain(self._options.drain_timeout_s)

    async def stop(self) -> None:
        """Closes sessions, copiers, sockets and the arena. May be called twice."""
        parts, self._parts = self._parts, None
        if parts is not None:
            await parts.stop()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()
        self._lock.drop()


async def run(options: DaemonOptions, *, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains and stops."""
    daemon = Daemon(options)
    await daemon.start()
    try:
        await stop.wait()
        log.info("draining", timeout_s=options.drain_timeout_s)
        await daemon.drain()
    finally:
        await daemon.stop()
    log.info("stopped")


class _Parts:
    """Everything above the arena, wired together."""

    def __init__(self, options: DaemonOptions, arena: Arena) -> None:
        loop = asyncio.get_running_loop()
        clock = loop.time
        service = options.service
        self.boot_id = secrets.token_bytes(16)
        cache = Cache(_cache_options(options), LruPolicy())

        def make_copier(device: str, events: CopierEvents) -> Copier:
            copier_options = CopierOptions(
                start_timeout_s=options.copier_start_timeout_s,
                ping_timeout_s=options.copier_ping_timeout_s,
            )
            return Copier(device, arena.data_fd, arena.size_bytes, copier_options, events)

        self._copiers = Copiers(options.devices, make_copier)
        self._sessions = Sessions(service)
        self._stores = StoreService(cache, arena, self._copiers, self._find, clock)
        apply = self._stores.apply
        namespaces = Namespaces(cache, arena, apply, service.namespaces_max, clock)
        self._instances = Instances(service, self._sessions, namespaces, self._copiers, clock)
        self._loads = LoadService(cache, self._copiers, apply, service, clock)
        self._instances.rank_lost += [self._loads.rank_lost, self._stores.rank_lost]
        self._instances.ended.append(self._stores.instance_ended)
        fences = FenceService(self._stores, self._loads)
        self._transfers = TransferService(self._stores, self._loads, fences, namespaces, service)
        self._lookups = LookupService(cache, self._instances, namespaces, apply, clock)
        self._janitor = Janitor(cache, self._stores, self._loads, service, clock)
        admin = AdminService(
            cache,
            arena,
            self._copiers,
            self._sessions,
            self._instances,
            namespaces,
            self.boot_id,
            options.rpc.socket,
            clock,
        )
        offload = OffloadServicer(
            self._sessions,
            self._instances,
            namespaces,
            self._transfers,
            self._lookups,
            service,
            self.boot_id,
        )
        self._rpc = RpcServer(options.rpc, self._sessions, offload, AdminServicer(admin))
        self._handshake = HandshakeServer(
            loop, self._sessions, self._loads, options.rpc, service, self.boot_id
        )
        self._copiers.changed.append(self._copiers_changed)
        self._health_tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """The sockets come last: whoever connects finds everything there."""
        await self._copiers.start()
        self._janitor.start()
        await self._rpc.start()
        await self._report_health()
        self._handshake.start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new; wait for what runs."""
        self._sessions.draining = self._transfers.draining = self._lookups.draining = True
        await self._report_health()
        try:
            async with asyncio.timeout(timeout_s):
                # Looked at, not waited for: what ends a job need not know of drains.
                while self._stores.copies_open or self._loads.loads_open:  # noqa: ASYNC110 - see above
                    await asyncio.sleep(DRAIN_LOOK_S)
        except TimeoutError:
            log.warning(
                "drain gives up on running jobs",
                stores=self._stores.copies_open,
                loads=self._loads.loads_open,
            )

    async def stop(self) -> None:
        """Sessions first, so that each peer hears why; then what served them."""
        self._sessions.draining = True
        self._handshake.stop("The daemon is stopping.")
        await self._rpc.stop(CALLS_GRACE_S)
        try:
            async with asyncio.timeout(POOLS_CLOSED_S):
                await self._instances.wait_closed()
        except TimeoutError:
            log.warning("pools are not unmapped in time")
        await self._copiers.stop()
        await self._instances.wait_closed()
        await self._janitor.stop()

    def _find(self, key: InstanceKey) -> Instance | None:
        return self._instances.get(key)

    def _copiers_changed(self) -> None:
        task = asyncio.get_running_loop().create_task(self._report_health())
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _report_health(self) -> None:
        serves = self._copiers.all_up and not self._sessions.draining
        await self._rpc.report_health(offload=serves, admin=True)


def _make_arena(options: DaemonOptions) -> Arena:
    return Arena.create(
        ArenaOptions(
            extents_total=options.arena_bytes // options.extent_bytes,
            extent_bytes=options.extent_bytes,
            slot_align_bytes=options.slot_align_bytes,
        )
    )


def _cache_options(options: DaemonOptions) -> CacheOptions:
    return CacheOptions(
        extents_total=options.arena_bytes // options.extent_bytes,
        extent_bytes=options.extent_bytes,
        slot_align_bytes=options.slot_align_bytes,
        lease_ttl_s=options.service.lease_ttl_s,
        store_deadline_s=options.service.store_deadline_s,
        leases_max=options.service.leases_max,
        open_jobs_max=options.service.open_jobs_max,
    )

"""Admin: frozen pictures of the daemon for an operator.

Keeps no state and changes nothing. Runs on the loop thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffd import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd.arena.arena import Arena
    from kvoffd.copier.supervisor import Copier
    from kvoffd.core.cache import Cache
    from kvoffd.core.ledger import Ledger
    from kvoffd.core.types import CacheStatistics
    from kvoffd.service.copiers import Copiers
    from kvoffd.service.instances import Instance, Instances
    from kvoffd.service.namespaces import Fields, Namespaces
    from kvoffd.service.sessions import Sessions


@dataclass(frozen=True, slots=True)
class ArenaStatus:
    """The host memory."""

    backing: str
    size_bytes: int
    extent_bytes: int
    extents_total: int


@dataclass(frozen=True, slots=True)
class CopierStatus:
    """One device's copier."""

    device: str
    incarnation: int
    pid: int
    state: str
    batches_in_flight: int
    store_bytes: int
    load_bytes: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Status:
    """The daemon as a whole."""

    daemon_version: str
    boot_id: bytes
    uptime_s: float
    draining: bool
    socket: str
    arena: ArenaStatus
    cache: CacheStatistics
    ledger: Ledger
    copiers: tuple[CopierStatus, ...]
    sessions: int
    instances: int
    namespaces: int


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One running engine."""

    instance_id: str
    nonce: str
    digest: bytes
    ranks_total: int
    ranks_registered: tuple[int, ...]
    scheduler_registered: bool
    pids: tuple[int, ...]
    age_s: float
    leases: int
    jobs_in_flight: int
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """One namespace that has had a rank."""

    digest: bytes
    generation: int
    ranks_total: int
    blocks_ready: int
    bytes_used: int
    fields: Fields


class AdminService:
    """Answers an operator's questions."""

    def __init__(
        self,
        cache: Cache,
        arena: Arena,
        copiers: Copiers,
        sessions: Sessions,
        instances: Instances,
        namespaces: Namespaces,
        boot_id: bytes,
        socket: str,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._copiers = copiers
        self._sessions = sessions
        self._instances = instances
        self._namespaces = namespaces
        self._boot_id = boot_id
        self._socket = socket
        self._clock = clock
        self._started_s = clock()

    def status(self) -> Status:
        """The daemon as a whole."""
        arena = self._arena
        return Status(
            daemon_version=__version__,
            boot_id=self._boot_id,
            uptime_s=self._clock() - self._started_s,
            draining=self._sessions.draining,
            socket=self._socket,
            arena=ArenaStatus(
                backing="memfd",
                size_bytes=arena.size_bytes,
                extent_bytes=arena.extent_bytes,
                extents_total=arena.size_bytes // arena.extent_bytes,
            ),
            cache=self._cache.statistics(),
            ledger=self._cache.ledger_total(),
            copiers=tuple(_copier(copier) for copier in self._copiers),
            sessions=len(self._sessions),
            instances=len(self._instances),
            namespaces=len(self._namespaces),
        )

    def instances(self) -> tuple[InstanceStatus, ...]:
        """Those alive, oldest first."""
        return tuple(self._instance(instance) for instance in self._instances.all())

    def namespaces(self) -> tuple[NamespaceStatus, ...]:
        """All that have had a rank since the start."""
        return tuple(
            NamespaceStatus(
                digest=view.digest,
                generation=view.generation,
                ranks_total=view.ranks_total,
                blocks_ready=view.blocks_ready,
                bytes_used=view.bytes_used,
                fields=self._namespaces.fields(view.digest),
            )
            for view in self._cache.namespaces()
        )

    def _instance(self, instance: Instance) -> InstanceStatus:
        pids = dict.fromkeys(session.peer.pid for session in instance.sessions)
        return InstanceStatus(
            instance_id=instance.instance_id,
            nonce=instance.nonce,
            digest=instance.digest,
            ranks_total=instance.ranks_total,
            ranks_registered=tuple(sorted(instance.seats)),
            scheduler_registered=instance.scheduler is not None,
            pids=tuple(pids),
            age_s=self._clock() - instance.started_s,
            leases=self._cache.leases_of(instance.key),
            jobs_in_flight=sum(seat.jobs_in_flight for seat in instance.seats.values()),
            ledger=self._cache.ledger(instance.key),
        )


def _copier(copier: Copier) -> CopierStatus:
    return CopierStatus(
        device=copier.device,
        incarnation=copier.incarnation,
        pid=copier.pid,
        state=copier.state,
        batches_in_flight=copier.batches_in_flight,
        store_bytes=copier.store_bytes,
        load_bytes=copier.load_bytes,
        restarts=copier.restarts,
    )

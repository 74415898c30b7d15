"""The Admin service: what an operator asks. Needs a session of role admin.

Keeps no state and changes nothing. Runs on the loop thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffd.errors import Forbidden
from kvoffd.service.sessions import Role
from kvoffd_proto.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from kvoffd.core.ledger import Ledger
    from kvoffd.core.types import CacheStatistics
    from kvoffd.service.admin import AdminService, InstanceStatus
    from kvoffd.service.sessions import Session


@dataclass(frozen=True, slots=True)
class AdminServicer:
    """Methods are named as in the proto file; see rpc/methods.py for how they are called."""

    service: AdminService

    async def Status(  # noqa: N802 - the proto file names it
        self, session: Session, request: pb.StatusRequest
    ) -> pb.StatusResponse:
        """The daemon as a whole."""
        del request
        _require_admin(session)
        status = self.service.status()
        return pb.StatusResponse(
            daemon_version=status.daemon_version,
            boot_id=status.boot_id,
            uptime_s=status.uptime_s,
            draining=status.draining,
            socket=status.socket,
            arena=pb.ArenaStatus(
                backing=status.arena.backing,
                size_bytes=status.arena.size_bytes,
                extent_bytes=status.arena.extent_bytes,
                extents_total=status.arena.extents_total,
                extents_used=status.cache.extents_used,
                slots_used=status.cache.slots_used,
                bytes_used=status.cache.bytes_used,
            ),
            cache=_cache(status.cache),
            ledger=_ledger(status.ledger),
            copiers=[
                pb.CopierStatus(
                    device=copier.device,
                    incarnation=copier.incarnation,
                    pid=copier.pid,
                    state=copier.state,
                    batches_in_flight=copier.batches_in_flight,
                    store_bytes=copier.store_bytes,
                    load_bytes=copier.load_bytes,
                    restarts=copier.restarts,
                )
                for copier in status.copiers
            ],
            sessions=status.sessions,
            instances=status.instances,
            namespaces=status.namespaces,
        )

    async def Instances(  # noqa: N802 - as above
        self, session: Session, request: pb.InstancesRequest
    ) -> pb.InstancesResponse:
        """Running engines, oldest first."""
        del request
        _require_admin(session)
        instances = [_instance(instance) for instance in self.service.instances()]
        return pb.InstancesResponse(instances=instances)

    async def Namespaces(  # noqa: N802 - as above
        self, session: Session, request: pb.NamespacesRequest
    ) -> pb.NamespacesResponse:
        """Namespaces that have had a rank since the start."""
        del request
        _require_admin(session)
        return pb.NamespacesResponse(
            namespaces=[
                pb.NamespaceStatus(
                    digest=namespace.digest,
                    generation=namespace.generation,
                    ranks_total=namespace.ranks_total,
                    blocks_ready=namespace.blocks_ready,
                    bytes_used=namespace.bytes_used,
                    fields=[
                        pb.NamespaceFieldStatus(name=name, value=value)
                        for name, value in namespace.fields
                    ],
                )
                for namespace in self.service.namespaces()
            ]
        )


def _require_admin(session: Session) -> None:
    if session.role is not Role.ADMIN:
        raise Forbidden(f"A session of role {session.role.value} may not ask for this.")


def _cache(cache: CacheStatistics) -> pb.CacheStatus:
    return pb.CacheStatus(
        blocks_ready=cache.blocks_ready,
        blocks_pending=cache.blocks_pending,
        leases=cache.leases,
        holds=cache.holds,
        loads_in_flight=cache.loads_in_flight,
        lookups=cache.lookups,
        lookup_blocks=cache.lookup_blocks,
        lookup_hit_blocks=cache.lookup_hit_blocks,
        evicted_blocks=cache.evicted_blocks,
        loaded_blocks=cache.loaded_blocks,
        failed_load_blocks=cache.failed_load_blocks,
        slots_quarantined=cache.slots_quarantined,
    )


def _ledger(ledger: Ledger) -> pb.BlockLedger:
    counts = [
        (reason.is_rejection, pb.ReasonCount(reason=reason.value, blocks=blocks))
        for reason, blocks in ledger.unstored
    ]
    return pb.BlockLedger(
        submitted=ledger.submitted,
        stored=ledger.stored,
        present=ledger.present,
        rejected=[count for is_rejection, count in counts if is_rejection],
        failed=[count for is_rejection, count in counts if not is_rejection],
        in_flight=ledger.in_flight,
    )


def _instance(instance: InstanceStatus) -> pb.InstanceStatus:
    return pb.InstanceStatus(
        id=instance.instance_id,
        nonce=instance.nonce,
        namespace_digest=instance.digest,
        ranks_total=instance.ranks_total,
        ranks_registered=instance.ranks_registered,
        scheduler_registered=instance.scheduler_registered,
        pids=instance.pids,
        age_s=instance.age_s,
        leases=instance.leases,
        jobs_in_flight=instance.jobs_in_flight,
        ledger=_ledger(instance.ledger),
    )

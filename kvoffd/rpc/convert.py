"""Convert: all validation of gRPC requests, and the way back from results to messages.

Pure; runs on the loop thread. What leaves here is within the bounds of its session, so
no later layer looks at a client's numbers again. Every refusal is a BadRequest with a
sentence that names the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.types import UnstoredReason
from kvoffd.devices.base import Region
from kvoffd.errors import BadRequest
from kvoffd.service.instances import Registration
from kvoffd.service.pools import RankDescription
from kvoffd.service.seats import LoadRequest, StoreRequest
from kvoffd.service.streams import LoadStatus
from kvoffd.service.transfer import Step
from kvoffd_proto.v1 import offload_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.seats import Seat
    from kvoffd.service.streams import Outcomes

#: Of an instance's id and nonce, and of a namespace's field.
NAME_BYTES_MAX = 256
FIELD_BYTES_MAX = 4096
FIELDS_MAX = 256
#: What a slot record has room for.
HASH_BYTES_MAX = 32
GROUPS_MAX = 1 << 16
RELEASES_MAX = 65536

_UNSTORED = {
    UnstoredReason.NO_SLOT: pb.UNSTORED_REASON_NO_SLOT,
    UnstoredReason.STALE_GENERATION: pb.UNSTORED_REASON_STALE_GENERATION,
    UnstoredReason.NOT_COMPLETE: pb.UNSTORED_REASON_NOT_COMPLETE,
    UnstoredReason.DRAINING: pb.UNSTORED_REASON_DRAINING,
    UnstoredReason.OVERLOADED: pb.UNSTORED_REASON_OVERLOADED,
    UnstoredReason.REVOKED: pb.UNSTORED_REASON_REVOKED,
    UnstoredReason.COPIER: pb.UNSTORED_REASON_COPIER,
    UnstoredReason.DEADLINE: pb.UNSTORED_REASON_DEADLINE,
    UnstoredReason.RANK_LOST: pb.UNSTORED_REASON_RANK_LOST,
    UnstoredReason.GENERATION_MOVED: pb.UNSTORED_REASON_GENERATION_MOVED,
}
_LOAD_STATUS = {
    LoadStatus.LOADED: pb.LOAD_STATUS_LOADED,
    LoadStatus.LEASE_NOT_FOUND: pb.LOAD_STATUS_LEASE_NOT_FOUND,
    LoadStatus.STALE_GENERATION: pb.LOAD_STATUS_STALE_GENERATION,
    LoadStatus.REVOKED: pb.LOAD_STATUS_REVOKED,
    LoadStatus.COPIER: pb.LOAD_STATUS_COPIER,
    LoadStatus.DEADLINE: pb.LOAD_STATUS_DEADLINE,
    LoadStatus.DRAINING: pb.LOAD_STATUS_DRAINING,
    LoadStatus.OVERLOADED: pb.LOAD_STATUS_OVERLOADED,
}


def registration(message: pb.RegisterRequest, options: ServiceOptions) -> Registration:
    """What a session says that it is a part of."""
    _length("instance.id", len(message.instance.id.encode()), 1, NAME_BYTES_MAX)
    _length("instance.nonce", len(message.instance.nonce.encode()), 1, NAME_BYTES_MAX)
    _within("ranks_total", message.ranks_total, 1, options.ranks_max)
    rank = None
    if message.HasField("rank"):
        rank = _rank(message.rank, message.ranks_total, options)
    return Registration(
        instance_id=message.instance.id,
        nonce=message.instance.nonce,
        fields=_fields(message.namespace),
        ranks_total=message.ranks_total,
        rank=rank,
    )


def _fields(namespace: pb.Namespace) -> tuple[tuple[str, str], ...]:
    _within("The number of namespace.fields", len(namespace.fields), 1, FIELDS_MAX)
    fields: dict[str, str] = {}
    for field in namespace.fields:
        _length("A namespace field's name", len(field.name.encode()), 1, NAME_BYTES_MAX)
        _length(f"Namespace field {field.name!r}", len(field.value.encode()), 0, FIELD_BYTES_MAX)
        if field.name in fields:
            raise BadRequest(f"Namespace field {field.name!r} is there twice.")
        fields[field.name] = field.value
    return tuple(fields.items())


def _rank(
    message: pb.RankRegistration, ranks_total: int, options: ServiceOptions
) -> RankDescription:
    _within("rank", message.rank, 0, ranks_total - 1)
    _within("The number of regions", len(message.regions), 1, options.regions_max)
    for region in message.regions:
        _within("A region's group", region.group, 0, GROUPS_MAX - 1)
    return RankDescription(
        rank=message.rank,
        device=message.device,
        ticket_memory_index=message.ticket_memory_index,
        ticket_cells=message.ticket_cells,
        pool_blocks=message.pool_blocks,
        regions=tuple(
            Region(
                group=region.group,
                memory=region.memory_index,
                offset_bytes=region.offset_bytes,
                block_stride_bytes=region.block_stride_bytes,
                block_bytes=region.block_bytes,
            )
            for region in message.regions
        ),
    )


def step(message: pb.Step, seat: Seat, options: ServiceOptions) -> Step:
    """One message of a rank, whole or not at all."""
    return Step(
        stores=[_store(store, seat, options) for store in message.stores],
        loads=[_load(load, seat, options) for load in message.loads],
        revoked_job_ids=list(message.revoked_job_ids),
    )


def _store(message: pb.StoreJob, seat: Seat, options: ServiceOptions) -> StoreRequest:
    job_id = message.job_id
    _job("Store", job_id, message.ticket_cell, seat)
    blocks = message.blocks
    _within(f"Store job {job_id}: blocks", len(blocks), 1, options.store_blocks_max)
    hashes = [block.hash for block in blocks]
    hash_bytes = len(hashes[0])
    _length(f"Store job {job_id}: a hash", hash_bytes, 1, HASH_BYTES_MAX)
    if len(set(map(len, hashes))) > 1:
        raise BadRequest(f"Store job {job_id} has hashes of different lengths.")
    parent_hash = message.parent_hash
    if parent_hash and len(parent_hash) != hash_bytes:
        raise BadRequest(f"Store job {job_id} has a parent hash of {len(parent_hash)} bytes.")
    block_ids = [block.block_id for block in blocks]
    _block_ids(f"Store job {job_id}", block_ids, seat)
    return StoreRequest(
        job_id=job_id,
        generation=message.generation,
        group=message.group,
        ticket_cell=message.ticket_cell,
        bell=message.bell,
        parent_hash=parent_hash,
        hashes=hashes,
        block_ids=block_ids,
    )


def _load(message: pb.LoadJob, seat: Seat, options: ServiceOptions) -> LoadRequest:
    job_id = message.job_id
    _job("Load", job_id, message.ticket_cell, seat)
    block_ids = list(message.block_ids)
    _within(f"Load job {job_id}: blocks", len(block_ids), 1, options.load_blocks_max)
    _block_ids(f"Load job {job_id}", block_ids, seat)
    if len(set(block_ids)) != len(block_ids):
        raise BadRequest(f"Load job {job_id} names a destination twice.")
    if not message.deadline_ms:
        raise BadRequest(f"Load job {job_id} has no deadline_ms.")
    return LoadRequest(
        job_id=job_id,
        generation=message.generation,
        ticket_cell=message.ticket_cell,
        bell=message.bell,
        lease_id=message.lease_id,
        skip_blocks=message.skip_blocks,
        block_ids=block_ids,
        deadline_s=message.deadline_ms / 1000,
    )


def _job(kind: str, job_id: int, ticket_cell: int, seat: Seat) -> None:
    if not job_id:
        raise BadRequest(f"{kind} job ids begin at 1.")
    if ticket_cell >= seat.ticket_cells:
        raise BadRequest(
            f"{kind} job {job_id} has ticket cell {ticket_cell}; the page has {seat.ticket_cells}."
        )


def _block_ids(job: str, block_ids: list[int], seat: Seat) -> None:
    if max(block_ids) >= seat.pool_blocks:
        raise BadRequest(
            f"{job} has block id {max(block_ids)}; the pool has {seat.pool_blocks} blocks."
        )


def lookup_hashes(message: pb.LookupRequest, options: ServiceOptions) -> Iterator[bytes]:
    """The hashes of a lookup, cut one by one as far as they are asked for."""
    size = message.hash_bytes
    packed = message.hashes
    _length("hash_bytes", size, 1, HASH_BYTES_MAX)
    if len(packed) % size:
        raise BadRequest(f"{len(packed)} bytes of hashes are no multiple of {size}.")
    _within("The number of hashes", len(packed) // size, 1, options.lookup_blocks_max)
    return (packed[start : start + size] for start in range(0, len(packed), size))


def released(message: pb.ReleaseRequest) -> list[int]:
    """Leases to give back."""
    _within("The number of lease_ids", len(message.lease_ids), 1, RELEASES_MAX)
    return list(message.lease_ids)


def completions(outcomes: Outcomes) -> pb.RankReply:
    """All outcomes that were ready, in one message."""
    return pb.RankReply(
        completions=pb.Completions(
            stores=[
                pb.StoreOutcome(
                    job_id=store.job_id,
                    blocks_stored=store.stored,
                    blocks_present=store.present,
                    unstored=[
                        pb.UnstoredBlocks(reason=_UNSTORED[reason], blocks=blocks)
                        for reason, blocks in store.unstored
                    ],
                )
                for store in outcomes.stores
            ],
            loads=[
                pb.LoadOutcome(job_id=load.job_id, status=_LOAD_STATUS[load.status])
                for load in outcomes.loads
            ],
        )
    )


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadRequest(f"{name} is {value}; from {least} to {most} is allowed.")


def _length(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadRequest(f"{name} has {value} bytes; from {least} to {most} are allowed.")

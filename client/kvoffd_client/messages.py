"""Between the ports' plain values and protobuf. Pure; on the background loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd_client.lease_ids import lease_number
from kvoffd_client.ports import LoadResult, LoadWork, Reason, ReasonCount, StoreResult, StoreWork
from kvoffd_proto.v1 import offload_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffd_client.descriptions import EngineIdentity, RankDescription
    from kvoffd_client.ports import Step

# From this value of UnstoredReason on the daemon tried to store and could not.
_FIRST_FAILURE = 100
_DEADLINE_MS_MAX = 2**32 - 1

_UNSTORED = {
    offload_pb2.UNSTORED_REASON_NO_SLOT: Reason.NO_SLOT,
    offload_pb2.UNSTORED_REASON_STALE_GENERATION: Reason.STALE_GENERATION,
    offload_pb2.UNSTORED_REASON_NOT_COMPLETE: Reason.NOT_COMPLETE,
    offload_pb2.UNSTORED_REASON_DRAINING: Reason.DRAINING,
    offload_pb2.UNSTORED_REASON_OVERLOADED: Reason.OVERLOADED,
    offload_pb2.UNSTORED_REASON_REVOKED: Reason.REVOKED,
    offload_pb2.UNSTORED_REASON_COPIER: Reason.COPIER,
    offload_pb2.UNSTORED_REASON_DEADLINE: Reason.DEADLINE,
    offload_pb2.UNSTORED_REASON_RANK_LOST: Reason.RANK_LOST,
    offload_pb2.UNSTORED_REASON_GENERATION_MOVED: Reason.GENERATION_MOVED,
}
_LOAD = {
    offload_pb2.LOAD_STATUS_LOADED: None,
    offload_pb2.LOAD_STATUS_LEASE_NOT_FOUND: Reason.LEASE_NOT_FOUND,
    offload_pb2.LOAD_STATUS_STALE_GENERATION: Reason.STALE_GENERATION,
    offload_pb2.LOAD_STATUS_REVOKED: Reason.REVOKED,
    offload_pb2.LOAD_STATUS_COPIER: Reason.COPIER,
    offload_pb2.LOAD_STATUS_DEADLINE: Reason.DEADLINE,
    offload_pb2.LOAD_STATUS_DRAINING: Reason.DRAINING,
    offload_pb2.LOAD_STATUS_OVERLOADED: Reason.OVERLOADED,
}


def register_request(engine: EngineIdentity) -> offload_pb2.RegisterRequest:
    """A scheduler's registration; a rank adds what `rank_registration` makes."""
    fields = [
        offload_pb2.NamespaceField(name=name, value=value) for name, value in engine.namespace
    ]
    return offload_pb2.RegisterRequest(
        instance=offload_pb2.Instance(id=engine.instance_id, nonce=engine.nonce),
        namespace=offload_pb2.Namespace(fields=fields),
        ranks_total=engine.ranks_total,
    )


def rank_registration(rank: RankDescription, ticket_cells: int) -> offload_pb2.RankRegistration:
    """A rank's pool; the ticket page is offered after the pool's memories."""
    regions = [
        offload_pb2.Region(
            group=region.group,
            memory_index=region.memory_index,
            offset_bytes=region.offset_bytes,
            block_stride_bytes=region.block_stride_bytes,
            block_bytes=region.block_bytes,
        )
        for region in rank.regions
    ]
    return offload_pb2.RankRegistration(
        rank=rank.rank,
        device=rank.device,
        ticket_memory_index=len(rank.memories),
        ticket_cells=ticket_cells,
        pool_blocks=rank.pool_blocks,
        regions=regions,
    )


def job_blocks(step: Step) -> int:
    """How much a step weighs in a message; a revoked id counts as a block."""
    stores = sum(len(store.block_ids) for store in step.stores)
    loads = sum(len(load.block_ids) for load in step.loads)
    return stores + loads + len(step.revoked_job_ids)


def step_message(steps: Sequence[Step], boot_id: bytes, now_s: float) -> offload_pb2.RankMessage:
    """Steps that were handed over one after another as one message."""
    message = offload_pb2.Step()
    for step in steps:
        message.stores.extend([_store_job(store) for store in step.stores])
        message.loads.extend([_load_job(load, boot_id, now_s) for load in step.loads])
        message.revoked_job_ids.extend(step.revoked_job_ids)
    return offload_pb2.RankMessage(step=message)


def _store_job(store: StoreWork) -> offload_pb2.StoreJob:
    return offload_pb2.StoreJob(
        job_id=store.job_id,
        generation=store.generation,
        group=store.group,
        ticket_cell=store.ticket_cell,
        bell=store.bell,
        parent_hash=store.parent_hash,
        blocks=[
            offload_pb2.BlockRef(hash=block_hash, block_id=block_id)
            for block_hash, block_id in zip(store.block_hashes, store.block_ids, strict=True)
        ],
    )


def _load_job(load: LoadWork, boot_id: bytes, now_s: float) -> offload_pb2.LoadJob:
    left_ms = int((load.deadline_s - now_s) * 1000)
    return offload_pb2.LoadJob(
        job_id=load.job_id,
        generation=load.generation,
        ticket_cell=load.ticket_cell,
        bell=load.bell,
        lease_id=lease_number(boot_id, load.lease_id),
        skip_blocks=load.skip_blocks,
        block_ids=load.block_ids,
        deadline_ms=min(max(left_ms, 1), _DEADLINE_MS_MAX),
    )


def session_store_result(job_id: int, blocks: int, reason: Reason) -> StoreResult:
    """A store's end that the session tells in the daemon's place."""
    failed = (ReasonCount(reason, blocks),) if blocks else ()
    return StoreResult(job_id, failed=failed, from_daemon=False)


def store_result(outcome: offload_pb2.StoreOutcome, blocks: int) -> StoreResult | None:
    """A store's end as the daemon tells it; None when it does not account for `blocks`."""
    unstored = outcome.unstored
    told = outcome.blocks_stored + outcome.blocks_present + sum(part.blocks for part in unstored)
    if told != blocks:
        return None
    rejected = [part for part in unstored if part.reason < _FIRST_FAILURE]
    failed = [part for part in unstored if part.reason >= _FIRST_FAILURE]
    return StoreResult(
        outcome.job_id,
        stored=outcome.blocks_stored,
        present=outcome.blocks_present,
        rejected=tuple(_reason_count(part) for part in rejected),
        failed=tuple(_reason_count(part) for part in failed),
    )


def _reason_count(part: offload_pb2.UnstoredBlocks) -> ReasonCount:
    return ReasonCount(_UNSTORED.get(part.reason, Reason.UNKNOWN), part.blocks)


def load_result(outcome: offload_pb2.LoadOutcome) -> LoadResult:
    """A load's end as the daemon tells it; a status we do not know is a failure."""
    return LoadResult(outcome.job_id, _LOAD.get(outcome.status, Reason.UNKNOWN))

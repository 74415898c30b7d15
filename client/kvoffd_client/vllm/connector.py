"""KvoffdConnector: vLLM's hooks, each handed to the side that it belongs to.

vLLM makes one object in the scheduler's process and one in each worker, and calls
either only on its own thread. Nothing here waits, decides or raises; what each hook
means for us is said in docs/protocol.md and the halves.

From 0.29 on vLLM may call start_load_kv after the forward; from 0.31 on it calls
wait_for_save in steps without a forward. Neither matters: stores are handed over in
the one hook that runs in every step of every version, get_finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvoffd_client.vllm.metadata import KvoffdMetadata, KvoffdReport, RankAnnouncement
from kvoffd_client.vllm.scheduler_side import SchedulerSide
from kvoffd_client.vllm.start import Start
from kvoffd_client.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvoffd_client.engine.metadata import StepMetadata
    from kvoffd_client.engine.rank import RankHalf


class KvoffdConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores KV blocks in the node's kvoffd and loads them back.

    Declares SupportsHMA so that vLLM keeps its memory layout, and refuses at start-up
    what it cannot serve: then the engine runs without offload.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        start = Start(vllm_config, kv_cache_config)
        self._scheduler = SchedulerSide(start) if role is KVConnectorRole.SCHEDULER else None
        self._worker = WorkerSide(start) if role is KVConnectorRole.WORKER else None

    # --- Worker: start-up ----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> RankAnnouncement | None:
        return None if self._worker is None else self._worker.announcement

    # --- Worker: one step, in this order ---------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KvoffdMetadata), "metadata of another connector"
        if (
            self._worker is not None
            and self._worker.half is not None
            # Without orders the scheduler's side has turned itself off, and ours rests too.
            and kv_connector_metadata.step is not None
        ):
            self._worker.half.handle_fences(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        half = self._awake_half()
        if half is not None:
            half.start_loads(self._bound_step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after all of them are in."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores go by whole blocks at the end of the step."""

    def wait_for_save(self) -> None:
        """Empty, because some versions leave it out in some steps."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        del finished_req_ids
        half = self._awake_half()
        if half is None:
            return None, None
        finished = half.finish_step(self._bound_step())
        # Blocks are never kept for a store, so nothing is ever finished sending.
        return None, set(finished.request_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._worker is None or self._worker.half is None:
            return set()
        return self._worker.half.take_failed_blocks()

    def build_connector_worker_meta(self) -> KvoffdReport | None:
        if self._worker is None or self._worker.half is None:
            return None
        report = self._worker.half.take_report()
        return None if report is None else KvoffdReport(report)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self._worker is not None and self._worker.half is not None:
            self._worker.half.end_step()

    # --- Scheduler -------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.announced(metadata)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvoffdMetadata:
        if self._scheduler is None:
            return KvoffdMetadata(None)
        return KvoffdMetadata(self._scheduler.build_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, KvoffdReport):
            self._scheduler.absorb(report.report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_push()

    def reset_cache(self) -> bool | None:
        return None if self._scheduler is None else self._scheduler.reset()

    # --- Both ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    def _awake_half(self) -> RankHalf | None:
        """The rank half, unless the scheduler's side has bound a step without orders."""
        if self._worker is None or self._worker.half is None:
            return None
        if self.has_connector_metadata() and self._bound_step() is None:
            return None
        return self._worker.half

    def _bound_step(self) -> StepMetadata | None:
        if not self.has_connector_metadata():
            return None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvoffdMetadata), "metadata of another connector"
        return metadata.step

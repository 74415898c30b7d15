"""The scheduler side: vLLM's requests and steps, in the words of the scheduler half.

One an engine, on the scheduler's thread. Keeps the living requests, because their
hashes grow. Without a half (refused, or the ranks have not announced themselves)
every hook does nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvoffd_client.descriptions import EngineIdentity
from kvoffd_client.engine.scheduler import SchedulerHalf
from kvoffd_client.engine.types import (
    EMPTY_STEP,
    RequestProgress,
    RequestView,
    SchedulerOptions,
    StepView,
)
from kvoffd_client.scheduler_session import SchedulerSession
from kvoffd_client.vllm import colocated, hash_root
from kvoffd_client.vllm.metadata import RankAnnouncement
from kvoffd_client.vllm.namespace import make_namespace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvoffd_client.engine.metadata import RankReport, StepMetadata
    from kvoffd_client.vllm.start import Start

log = logging.getLogger(__name__)


class SchedulerSide:
    """The scheduler's part of one engine."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._half: SchedulerHalf | None = None
        self._session: SchedulerSession | None = None
        self._block_tokens = start.spec.block_size if start.spec is not None else 0
        self._requests: dict[str, Request] = {}
        self._root_is_checked = False
        if start.refusal is not None:
            log.warning("kvoffd: this engine runs without offload: %s", start.refusal)
            return
        transfer = start.config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            # The scheduler reads it after it has made us. A cache must not fail a request.
            log.warning(
                "kvoffd: kv_load_failure_policy is set to recompute: with %s, which is vLLM's "
                "default, a block that cannot be loaded would end its request",
                transfer.kv_load_failure_policy,
            )
            transfer.kv_load_failure_policy = "recompute"
        if hash_root.settle_seed():
            log.info(
                "kvoffd: this vLLM would draw the root of its block hashes at random; it is made "
                "stable, as with PYTHONHASHSEED=%s",
                hash_root.STABLE_SEED,
            )

    def announced(self, announcements: Mapping[int, object]) -> None:
        """What the ranks found at start-up: only now is the namespace known."""
        if self._start.refusal is not None or self._half is not None:
            return
        try:
            self._announced(announcements)
        except Exception as error:  # a fault of ours must not end the engine
            log.exception("kvoffd: the scheduler side could not be set up")
            self._refuse(f"{type(error).__name__}: {error}")

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens to load beyond the computed ones; None: ask again."""
        half = self._half
        # Where all of the prompt is to be computed, there is nothing to look up.
        if (
            half is None
            or not _is_served(request)
            or getattr(request, "skip_reading_prefix_cache", False)
        ):
            return 0
        try:
            if not self._root_is_checked and not self._check_root():
                return 0
            self._requests[request.request_id] = request
            view = RequestView(request.request_id, request.block_hashes, request.num_tokens)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            half.turn_off("matched_tokens")
            return 0
        return half.lookup(view, computed_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """All blocks of a request."""
        if self._half is None:
            return
        if _is_served(request):
            self._requests[request.request_id] = request
        # Also those of requests that are not served: their blocks may be under a store.
        self._half.allocated(request.request_id, blocks.get_block_ids()[0], external_tokens)

    def build_step(self, output: SchedulerOutput) -> StepMetadata | None:
        """The step's orders."""
        if self._half is None:
            return None
        try:
            view = self._view(output)
        except Exception:  # noqa: BLE001 - a fault of ours must not end the engine
            # From now on every step only ends what is under way.
            self._half.turn_off("build_step")
            view = EMPTY_STEP
        return self._half.build_step(view)

    def finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """A request has ended, however."""
        if self._half is None:
            return
        known = self._requests.pop(request.request_id, None)
        hashes = () if known is None else request.block_hashes
        self._half.finished(
            request.request_id,
            request.num_computed_tokens,
            request.num_tokens,
            hashes,
            block_ids,
        )
        beside = colocated.find(self._start.instance_id, self._start.nonce)
        if beside is not None:
            late = self._half.take_late_stores()
            if late is not None:
                beside.take_late_stores(late)

    def absorb(self, report: RankReport) -> None:
        """What ended on the ranks."""
        if self._half is not None:
            self._half.absorb(report)

    def reset(self) -> bool | None:
        """False when the daemon has not confirmed; None when there is nothing to reset."""
        return None if self._half is None else self._half.reset()

    def has_pending_push(self) -> bool:
        """Whether a step is wanted only to hand over what is decided."""
        return self._half is not None and self._half.has_pending_push()

    def shutdown(self) -> None:
        """End the session, bounded."""
        self._half = None
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _announced(self, announcements: Mapping[int, object]) -> None:
        start = self._start
        layouts: set[str] = set()
        for rank in range(start.ranks_total):
            found = announcements.get(rank)
            if not isinstance(found, RankAnnouncement):
                self._refuse(f"rank {rank} did not announce itself")
                return
            if found.layout is None:
                self._refuse(f"rank {rank} says: {found.refusal}")
                return
            layouts.add(found.layout)
        if len(layouts) != 1:
            self._refuse("the ranks' layouts differ")
            return
        assert start.spec is not None, "an engine without a spec is refused"
        assert start.kv_cache_config is not None, "an engine without KV caches is refused"
        namespace = make_namespace(
            start.config, start.kv_cache_config, start.spec, start.settings, layouts.pop()
        )
        session = SchedulerSession(
            start.session_options(),
            EngineIdentity(start.instance_id, start.nonce, namespace, start.ranks_total),
        )
        options = SchedulerOptions(
            start.ranks_total,
            strict=start.settings.strict,
            lookup_deadline_s=start.settings.lookup_deadline_s,
        )
        self._session = session
        self._half = SchedulerHalf(session, self._block_tokens, options, time.monotonic)
        session.start()
        start.wait_for(session)

    def _check_root(self) -> bool:
        """Once, when vLLM has certainly made the root of its hashes."""
        algorithm = self._start.config.cache_config.prefix_caching_hash_algo
        self._root_is_checked = True
        if hash_root.is_as_declared(algorithm):
            return True
        self._refuse(
            "the root of the engine's block hashes is not the declared one; set PYTHONHASHSEED=0 "
            "in its environment"
        )
        return False

    def _refuse(self, reason: str) -> None:
        log.warning("kvoffd: this engine runs without offload: %s", reason)
        self.shutdown()

    def _view(self, output: SchedulerOutput) -> StepView:
        progress: list[RequestProgress] = []
        for new in output.scheduled_new_reqs:
            progress += self._progress(
                output, new.req_id, new.block_ids[0], new.num_computed_tokens, is_resumed=False
            )
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            given = cached.new_block_ids[at]
            progress += self._progress(
                output,
                request_id,
                given[0] if given else (),
                cached.num_computed_tokens[at],
                is_resumed=request_id in cached.resumed_req_ids,
            )
        copies = getattr(output, "kv_cache_block_copies", None) or ()
        return StepView(
            progress,
            output.preempted_req_ids or (),
            [block for copy in copies for block in _destinations(copy)],
        )

    def _progress(
        self,
        output: SchedulerOutput,
        request_id: str,
        new_block_ids: Sequence[int],
        computed: int,
        *,
        is_resumed: bool,
    ) -> list[RequestProgress]:
        drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        after = computed + output.num_scheduled_tokens[request_id] - drafted
        tokens = self._block_tokens
        if not new_block_ids and computed // tokens == after // tokens:
            return []
        request = self._requests.get(request_id)
        hashes = request.block_hashes if request is not None else ()
        return [RequestProgress(request_id, new_block_ids, after, is_resumed, hashes)]


def _is_served(request: Request) -> bool:
    """Not where equal hashes need not mean equal bytes: vLLM hashes an adapter's name only."""
    return request.lora_request is None and getattr(request, "prompt_embeds", None) is None


def _destinations(copy: object) -> tuple[int, ...]:
    """Blocks that a copy overwrites; its fields differ between versions."""
    for name in ("dst_block_id", "dst_block_ids", "dst"):
        value = getattr(copy, name, None)
        if value is not None:
            return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return ()

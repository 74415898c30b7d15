"""The vLLM connector with a clock around each of its hooks, for an engine in this process.

Owns SPENT, which the benchmark reads between two steps; engine and benchmark are one thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffd_client.vllm import KvoffdConnector

if TYPE_CHECKING:
    from collections.abc import Callable

# All hooks that vLLM calls in a step, wherever it calls them.
HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "request_finished_all_groups",
    "update_connector_output",
    "has_pending_push_work",
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


@dataclass
class Spent:
    """What the hooks took since the last `take`, what they moved, and what was computed."""

    seconds: float = 0.0
    stores: int = 0
    loads: int = 0
    tokens: int = 0
    depth: int = 0

    def take(self) -> Spent:
        taken = Spent(self.seconds, self.stores, self.loads, self.tokens)
        self.seconds, self.stores, self.loads, self.tokens = 0.0, 0, 0, 0
        return taken


SPENT = Spent()


def _timed(hook: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **keywords: Any) -> Any:
        began_s = time.perf_counter()
        SPENT.depth += 1
        try:
            return hook(*arguments, **keywords)
        finally:
            SPENT.depth -= 1
            if not SPENT.depth:  # a hook that calls another is counted once
                SPENT.seconds += time.perf_counter() - began_s

    return timed


class TimedConnector(KvoffdConnector):
    """The same connector."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        SPENT.tokens += scheduler_output.total_num_scheduled_tokens
        if metadata.step is not None:
            SPENT.stores += sum(len(order.block_ids) for order in metadata.step.stores)
            SPENT.loads += sum(len(order.block_ids) for order in metadata.step.loads)
        return metadata


for _hook in HOOKS:
    if hasattr(TimedConnector, _hook):
        setattr(TimedConnector, _hook, _timed(getattr(TimedConnector, _hook)))

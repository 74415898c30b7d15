"""An engine's configuration with the fields that the connector reads, as plain values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_TOKENS = 32
#: Where a name is not that of the place it changes: (place, field).
_PLACES = {
    "kv_role": ("kv_transfer_config", "kv_role"),
    "device_type": ("device_config", "device_type"),
    "load_format": ("load_config", "load_format"),
}


def engine_config(model: Path | str, /, **changes: Any) -> SimpleNamespace:
    """A configuration that is served; changes by the field's name, wherever it lies."""
    config = SimpleNamespace(
        instance_id="start-1",
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both",
            engine_id="engine-1",
            kv_connector_extra_config={},
            kv_load_failure_policy="recompute",
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            seed=0,
            runner_type="generate",
            dtype=torch.float32,
            quantization=None,
            max_model_len=1024,
            hf_config=SimpleNamespace(
                to_dict=lambda: {"rope_theta": 10000.0, "_name_or_path": str(model)},
                _commit_hash=None,
            ),
        ),
        cache_config=SimpleNamespace(
            block_size=BLOCK_TOKENS,
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            calculate_kv_scales=False,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_expert_parallel=False,
        ),
        speculative_config=None,
    )
    for name, value in changes.items():
        _change(config, name, value)
    return config


def attention(**changes: Any) -> FullAttentionSpec:
    fields = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 2,
        "head_size": 16,
        "dtype": torch.float32,
    }
    return FullAttentionSpec(**(fields | changes))


def cache_config(*specs: Any, layers: tuple[str, ...] = ("layer 0", "layer 1")) -> KVCacheConfig:
    """One KV cache group for each spec; one of full attention when none is named."""
    groups = [KVCacheGroupSpec(list(layers), spec) for spec in specs or (attention(),)]
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


def _change(config: SimpleNamespace, name: str, value: Any) -> None:
    if name in _PLACES:
        place, field = _PLACES[name]
        setattr(getattr(config, place), field, value)
        return
    for part in (config, *vars(config).values()):
        if isinstance(part, SimpleNamespace) and hasattr(part, name):
            setattr(part, name, value)
            return
    raise AssertionError(f"no field {name} in the configuration")

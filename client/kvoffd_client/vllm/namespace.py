"""The namespace: everything on which the bytes behind an equal block hash depend.

Pure but for looking at the weights' files. Made in every process of an engine from
what all of them know, so that all come to the same fields; the layout is the ranks'
finding and comes to the scheduler with vLLM's start-up handshake. A field too many is
a miss, one too few is wrong bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from kvoffd_client.vllm.hash_root import seed_field
from kvoffd_client.vllm.settings import Refusal

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

    from kvoffd_client.vllm.settings import Settings

# Raised when the meaning of a field changes: what was stored before is never found again.
NAMESPACE_VERSION = "1"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"})
# Says where the model lay or who wrote its configuration, not what it computes.
_NO_MATTER = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def make_namespace(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    spec: FullAttentionSpec,
    settings: Settings,
    layout: str,
) -> tuple[tuple[str, str], ...]:
    """Field names and values, in a fixed order."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    fields: dict[str, Any] = {
        "namespace_version": NAMESPACE_VERSION,
        # Layouts within a block change between releases without a name of their own.
        "engine": f"vllm {vllm.__version__}",
        "model": model.model,
        "model_config": _config_digest(model.hf_config),
        "weights": settings.weights_tag or _weights_identity(config),
        "dtype": model.dtype,
        "kv_dtype": f"{cache.cache_dtype} as {spec.dtype}",
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "block_tokens": spec.block_size,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "decode_context_parallel": parallel.decode_context_parallel_size,
        "expert_parallel": parallel.enable_expert_parallel,
        "layers": _digest(group.layer_names),
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "layer_block_bytes": spec.page_size_bytes,
        "layout": layout,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_root": seed_field(),
        "salt": settings.salt,
    }
    return tuple((name, str(value)) for name, value in fields.items())


def cpu_byte_order(config: VllmConfig, spec: FullAttentionSpec) -> str:
    """The instruction-set variant that orders the bytes within a block on CPU.

    `_get_attn_isa` of v1/attention/backends/cpu_attn.py decides it by the processor.
    """
    from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415 - on CPU engines only

    variant = cpu_attn._get_attn_isa(  # noqa: SLF001 - it has no public name
        config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype
    )
    return str(variant)


def _config_digest(hf_config: Any) -> str:
    values = {name: value for name, value in hf_config.to_dict().items() if name not in _NO_MATTER}
    return _digest(values)


def _digest(value: Any) -> str:
    encoded = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(encoded).hexdigest()[:32]


def check_weights(config: VllmConfig, settings: Settings) -> None:
    """Raises Refusal where nothing tells other weights of the same name apart."""
    if settings.weights_tag or "dummy" in str(config.load_config.load_format):
        return
    model = config.model_config
    if not Path(model.model).exists() and not getattr(model.hf_config, "_commit_hash", None):
        raise Refusal(
            f"nothing says which weights {model.model} are: it is no local path and has no commit; "
            'name them with "weights_tag" in kv_connector_extra_config'
        )


def _weights_identity(config: VllmConfig) -> str:
    """Revision and load format; of local files also every weight file's size and mtime.

    Reading hundreds of gigabytes at each start would cost more than it guards: a file
    that changes without its size or time is the user's to name with `weights_tag`.
    """
    model = config.model_config
    load_format = str(config.load_config.load_format)
    parts: list[Any] = [load_format, model.revision]
    if "dummy" in load_format:
        # Random weights come from the seed alone.
        parts.append(model.seed)
    place = Path(model.model)
    if place.exists():
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        parts.append(
            [
                (file.name, file.stat().st_size, file.stat().st_mtime_ns)
                for file in files
                if file.suffix in _WEIGHT_SUFFIXES
            ]
        )
    else:
        parts.append(getattr(model.hf_config, "_commit_hash", None))
    return _digest(parts)


def dtype_name(dtype: torch.dtype) -> str:
    """Without the module's name."""
    return str(dtype).removeprefix("torch.")

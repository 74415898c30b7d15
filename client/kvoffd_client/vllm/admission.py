"""Which engines the connector serves. Everything else is refused, with the reason.

Pure, at start-up, in every process of the engine: all come to the same answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvoffd_client.vllm.settings import Refusal

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Others can be made to collide on purpose, and then one prompt gets another's KV.
SAFE_HASHES = frozenset({"sha256", "sha256_cbor"})
# Others keep scales beside the blocks, or have not been looked at.
KV_DTYPES = frozenset({"auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"})


def check_engine(config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> FullAttentionSpec:
    """The one kind of KV cache of an engine that can be served. Raises Refusal."""
    if kv_cache_config is None:
        raise Refusal("this vLLM does not tell its connector how the KV cache is made")
    role = config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise Refusal(f"kv_role {role} is not supported; use kv_both")
    device = config.device_config.device_type
    if device != "cpu":
        raise Refusal(f"the KV cache is on a device of type {device}; only cpu is supported yet")
    if config.model_config.runner_type == "pooling":
        raise Refusal(
            "pooling models are not supported: some poolers need all of a prompt in one step"
        )
    spec = _spec(kv_cache_config)
    _check_ranks(config)
    if config.speculative_config is not None:
        raise Refusal("speculative decoding is not supported: a draft may follow the last hook")
    _check_bytes(config.cache_config)
    _check_hashes(config.cache_config, kv_cache_config, spec.block_size)
    return spec


def _check_ranks(config: VllmConfig) -> None:
    parallel = config.parallel_config
    for name, size in (
        ("pipeline", parallel.pipeline_parallel_size),
        ("decode context", parallel.decode_context_parallel_size),
        ("prefill context", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size > 1:
            raise Refusal(f"{name} parallelism of {size} is not supported: ranks differ in shape")


def _check_bytes(cache: CacheConfig) -> None:
    kv_dtype = str(cache.cache_dtype)
    if kv_dtype not in KV_DTYPES:
        raise Refusal(f"--kv-cache-dtype {kv_dtype} is not supported: its scales may lie elsewhere")
    if getattr(cache, "calculate_kv_scales", False):
        raise Refusal(
            "--calculate-kv-scales is not supported: the scales, and so the bytes, depend on the "
            "first batch of each engine"
        )


def _check_hashes(cache: CacheConfig, kv_cache_config: KVCacheConfig, spec_tokens: int) -> None:
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in SAFE_HASHES:
        raise Refusal(
            f"--prefix-caching-hash-algo {algorithm} is not collision resistant; "
            f"use one of {', '.join(sorted(SAFE_HASHES))}"
        )
    block_tokens = cache.block_size
    if spec_tokens != block_tokens:
        raise Refusal(
            f"the KV cache has blocks of {spec_tokens} tokens and the scheduler of {block_tokens}"
        )
    # The user's wish, and what the engine made of it; older releases know neither.
    for place in (cache, kv_cache_config):
        hash_tokens = getattr(place, "hash_block_size", None)
        if hash_tokens is not None and hash_tokens != block_tokens:
            raise Refusal(
                f"hashes cover {hash_tokens} tokens and blocks {block_tokens}: partial hits are "
                "not supported"
            )


def _spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Refusal(
            f"the model has {len(groups)} KV cache groups and one is supported: a prefix would be "
            "restored for some of its layers only"
        )
    spec = groups[0].kv_cache_spec
    # Subclasses keep other bytes than K and V of every token (MLA, sinks, windows).
    if type(spec) is not FullAttentionSpec:
        raise Refusal(f"KV caches of kind {type(spec).__name__} are not supported yet")
    if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
        raise Refusal("windowed attention is not supported: old blocks are dropped under a store")
    if kv_cache_config.needs_kv_cache_zeroing:
        raise Refusal("the model's runner zeroes KV blocks before the connector's first hook")
    return spec

"""What cannot be served is refused at start-up, with a sentence that says what and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

from kvoffd_client.vllm.scheduler_side import SchedulerSide
from kvoffd_client.vllm.settings import Settings
from kvoffd_client.vllm.start import Start
from tests.vllm.stand_ins import attention, cache_config, engine_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm]

WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=128
)
CONFIGURATIONS = [
    ({"kv_role": "kv_producer"}, "kv_role kv_producer is not supported; use kv_both"),
    ({"device_type": "cuda"}, "device of type cuda; only cpu"),
    ({"runner_type": "pooling"}, "pooling models are not supported: some poolers need all"),
    ({"pipeline_parallel_size": 2}, "pipeline parallelism of 2 is not supported"),
    ({"decode_context_parallel_size": 2}, "decode context parallelism of 2"),
    ({"prefill_context_parallel_size": 4}, "prefill context parallelism of 4"),
    ({"speculative_config": object()}, "speculative decoding is not supported: a draft"),
    ({"prefix_caching_hash_algo": "xxhash"}, "xxhash is not collision resistant; use one of"),
    ({"cache_dtype": "int8_per_token_head"}, "int8_per_token_head is not supported: its scales"),
    ({"calculate_kv_scales": True}, "first batch of each engine"),
    ({"block_size": 64}, "blocks of 32 tokens and the scheduler of 64"),
    ({"model": "somebody/some-model"}, 'no commit; name them with "weights_tag"'),
    ({"model": "s3://bucket/model"}, 'no commit; name them with "weights_tag"'),
    ({"kv_connector_extra_config": {"sokcet": "/x"}}, "no setting 'sokcet'; known: .*socket"),
    ({"kv_connector_extra_config": {"salt": 7}}, "salt cannot be 7"),
    ({"kv_connector_extra_config": {"strict": 1}}, "strict cannot be 1"),
    ({"kv_connector_extra_config": {"load_deadline_s": True}}, "load_deadline_s cannot be True"),
    ({"kv_connector_extra_config": {"ticket_cells": 1}}, "ticket_cells is from 64 to"),
    ({"kv_connector_extra_config": {"socket": "/" + "x" * 120}}, "is too long"),
]
CACHES: list[tuple[tuple[Any, ...], str]] = [
    ((WINDOW,), "KV caches of kind SlidingWindowSpec are not supported"),
    ((attention(sliding_window=128),), "windowed attention is not supported"),
    ((attention(), WINDOW), "2 KV cache groups and one is supported"),
]


@pytest.mark.parametrize(("changes", "sentence"), CONFIGURATIONS)
def test_a_configuration_that_is_not_served_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    start = Start(engine_config(tmp_path, **changes), cache_config())
    assert start.refusal is not None
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(start.refusal)


@pytest.mark.parametrize(("specs", "sentence"), CACHES)
def test_a_kv_cache_that_is_not_served_is_refused(
    tmp_path: Path, specs: tuple[Any, ...], sentence: str
) -> None:
    start = Start(engine_config(tmp_path), cache_config(*specs))
    assert start.refusal is not None
    assert sentence in start.refusal


def test_no_kv_cache_at_all_is_refused(tmp_path: Path) -> None:
    """Encoder models have none; some releases tell their connector nothing."""
    empty = cache_config()
    empty.kv_cache_groups.clear()
    assert "0 KV cache groups" in str(Start(engine_config(tmp_path), empty).refusal)
    assert "does not tell" in str(Start(engine_config(tmp_path), None).refusal)


def test_hashes_over_parts_of_blocks_are_refused(tmp_path: Path) -> None:
    """Else the hash of one part would name a whole block."""
    caches = cache_config()
    object.__setattr__(caches, "hash_block_size", 16)
    assert "hashes cover 16 tokens" in str(Start(engine_config(tmp_path), caches).refusal)


def test_a_runner_that_zeroes_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so before our first hook, so a fence would come too late."""
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    assert "zeroes KV blocks" in str(Start(engine_config(tmp_path), cache_config()).refusal)


def test_a_failed_load_never_fails_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The default of vLLM would; it is changed, and the user is told."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # else the connector may set it for good
    config = engine_config(tmp_path, kv_load_failure_policy="fail")
    SchedulerSide(Start(config, cache_config()))
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert "kv_load_failure_policy is set to recompute: with fail" in caplog.text
    caplog.clear()
    SchedulerSide(Start(config, cache_config()))
    assert caplog.text == "", "nothing was wrong this time"


def test_a_fault_in_looking_at_the_engine_is_a_refusal_and_no_exception(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    del config.cache_config
    refusal = Start(config, cache_config()).refusal
    assert refusal is not None
    assert "AttributeError" in refusal


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "somebody/some-model", "kv_connector_extra_config": {"weights_tag": "v7"}},
        {"model": "somebody/some-model", "load_format": "dummy"},
        {"cache_dtype": "fp8"},
        {"tensor_parallel_size": 4},
    ],
)
def test_what_is_served_is_not_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert Start(engine_config(tmp_path, **changes), cache_config()).refusal is None


def test_every_setting_has_its_kind() -> None:
    """A setting that parse does not know could never be given."""
    given = {
        "socket": "/s",
        "salt": "a",
        "weights_tag": "w",
        "strict": True,
        "lookup_deadline_s": 1,
        "load_deadline_s": 2.5,
        "heartbeat_timeout_s": 10,
        "start_wait_s": 0,
        "ticket_cells": 64,
    }
    assert set(given) == set(Settings.__slots__)
    assert Settings.parse(given) == Settings(**given)

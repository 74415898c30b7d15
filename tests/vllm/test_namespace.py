"""Engines share blocks exactly when equal hashes mean equal bytes: each field must matter."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvoffd_client.vllm import namespace
from kvoffd_client.vllm.settings import Settings
from tests.vllm.stand_ins import attention, cache_config, engine_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm]

LAYOUT = "vec 0123"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


def fields_of(
    model: Path | str,
    spec: Any = None,
    settings: Settings | None = None,
    layout: str = LAYOUT,
    layers: tuple[str, ...] = ("layer 0", "layer 1"),
    **changes: Any,
) -> tuple[tuple[str, str], ...]:
    found = spec or attention()
    return namespace.make_namespace(
        engine_config(model, **changes),
        cache_config(found, layers=layers),
        found,
        settings or Settings(),
        layout,
    )


def differing(one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...]) -> set[str]:
    assert [name for name, _ in one] == [name for name, _ in other], "fields and their order"
    return {
        name for (name, value), (_, changed) in zip(one, other, strict=True) if value != changed
    }


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("dtype", {"dtype": torch.bfloat16}),
    ("kv_dtype", {"cache_dtype": "fp8"}),
    ("quantization", {"quantization": "awq"}),
    ("max_model_len", {"max_model_len": 4096}),
    ("tensor_parallel", {"tensor_parallel_size": 2}),
    ("pipeline_parallel", {"pipeline_parallel_size": 2}),
    ("decode_context_parallel", {"decode_context_parallel_size": 2}),
    ("expert_parallel", {"enable_expert_parallel": True}),
    ("hash_algorithm", {"prefix_caching_hash_algo": "sha256_cbor"}),
    ("weights", {"revision": "other"}),
    ("weights", {"load_format": "gguf"}),
    ("kv_heads", {"spec": attention(num_kv_heads=4)}),
    ("head_size", {"spec": attention(head_size=32)}),
    ("block_tokens", {"spec": attention(block_size=64)}),
    ("layout", {"layout": "amx 0123"}),
    ("layers", {"layers": ("layer 0", "layer 1", "layer 2")}),
    ("salt", {"settings": Settings(salt="tenant")}),
    ("weights", {"settings": Settings(weights_tag="v2")}),
]


@pytest.mark.parametrize(("field", "changes"), CHANGES)
def test_each_field_makes_another_namespace(
    model: Path, field: str, changes: dict[str, Any]
) -> None:
    assert field in differing(fields_of(model), fields_of(model, **changes))


def test_all_fields_are_covered_here(model: Path) -> None:
    """A new field needs a case above, or a test of its own below."""
    own_tests = {"namespace_version", "engine", "model", "model_config", "hash_root"}
    derived = {"layer_block_bytes"}
    covered = {field for field, _ in CHANGES}
    assert {name for name, _ in fields_of(model)} == covered | own_tests | derived


def test_equal_engines_have_equal_fields(model: Path) -> None:
    """Names of a start, of an engine or of a folder on the way say nothing of bytes."""
    changed = fields_of(model, instance_id="start-2", engine_id="engine-2")
    assert differing(fields_of(model), changed) == set()


def test_the_models_configuration_matters_and_its_place_does_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config_with(**values: Any) -> tuple[tuple[str, str], ...]:
        config = engine_config(model)
        config.model_config.hf_config.to_dict = lambda: values
        return namespace.make_namespace(config, cache_config(), attention(), Settings(), LAYOUT)

    base = config_with(rope_theta=1.0, _name_or_path="/a")
    assert differing(base, config_with(rope_theta=1.0, _name_or_path="/b")) == set()
    assert differing(base, config_with(rope_theta=2.0, _name_or_path="/a")) == {"model_config"}
    monkeypatch.setattr(namespace.vllm, "__version__", "0.0.1")
    assert differing(base, config_with(rope_theta=1.0)) == {"engine"}
    monkeypatch.setattr(namespace, "NAMESPACE_VERSION", "next")
    assert "namespace_version" in differing(base, config_with(rope_theta=1.0))


def test_changed_weights_under_the_same_name_are_other_weights(model: Path) -> None:
    before = fields_of(model)
    weights = model / "model.safetensors"
    weights.write_bytes(b"WEIGHTS and more")
    larger = fields_of(model)
    assert differing(before, larger) == {"weights"}
    os.utime(weights, ns=(1, 1))
    assert differing(larger, fields_of(model)) == {"weights"}
    (model / "adapter.safetensors").write_bytes(b"x")
    assert differing(larger, fields_of(model)) == {"weights"}
    before = fields_of(model)
    (model / "README.md").write_text("no weights")
    assert differing(before, fields_of(model)) == set()


def test_a_model_in_one_file_is_looked_at_as_well(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    before = fields_of(file)
    file.write_bytes(b"another")
    assert differing(before, fields_of(file)) == {"weights"}


def test_a_tag_stands_for_the_weights_wherever_they_lie(model: Path) -> None:
    """A copy of the files elsewhere has other times; the user says that they are the same."""
    tagged = Settings(weights_tag="v1")
    before = fields_of(model, settings=tagged)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert differing(before, fields_of(model, settings=tagged)) == set()


def test_the_root_of_the_hashes_matters(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = fields_of(model)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert differing(one, fields_of(model)) == {"hash_root"}


def test_the_order_of_bytes_is_that_of_the_engines_own_choice() -> None:
    """It is asked with what the backend itself asks with."""
    found = namespace.cpu_byte_order(engine_config("m"), attention())
    assert found
    # Heads of 16, 48, ... have a variant of their own on every processor.
    assert namespace.cpu_byte_order(engine_config("m"), attention(head_size=48)) == "vec16"

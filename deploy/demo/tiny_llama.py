"""A Llama small enough to be made on the spot: random weights, fixed seed, float32.

As a program: `tiny_llama.py FOLDER`. Owns the model's folder and nothing else.
Tokens are the bytes of the text, so that neither a tokenizer nor a model hub is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

VOCABULARY_SIZE: Final = 512
_HIDDEN: Final = 256
_LAYERS: Final = 4
_HEADS: Final = 8
_KV_HEADS: Final = 4
_HEAD_SIZE: Final = _HIDDEN // _HEADS
_INTERMEDIATE: Final = 512
# Large enough that greedy tokens differ from prompt to prompt: with tiny weights every
# prompt ends in the same token, and comparing tokens would prove nothing.
_WEIGHT_SPREAD: Final = 0.08
POSITIONS_MAX: Final = 8192


def make_model(folder: Path, seed: int = 20) -> Path:
    """Write configuration and weights into folder; equal seeds give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_configuration(), indent=1))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens_of(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode("utf-8"))


def _configuration() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS_MAX,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        # Outside the vocabulary of bytes: no answer ends early.
        "bos_token_id": VOCABULARY_SIZE - 2,
        "eos_token_id": VOCABULARY_SIZE - 1,
        "torch_dtype": "float32",
    }


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * _WEIGHT_SPREAD

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY_SIZE, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": matrix(VOCABULARY_SIZE, _HIDDEN),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(_HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(_HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(_HEADS * _HEAD_SIZE, _HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_SIZE, _HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_SIZE, _HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_SIZE),
            prefix + "mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
        }
    return weights


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))

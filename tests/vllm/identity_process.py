"""What a fresh process says of its engine's identity, in a line of JSON: `… MODEL`.

Everything that Python or vLLM draws at random when a process starts is drawn anew here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvoffd_client.vllm import hash_root
from kvoffd_client.vllm.namespace import make_namespace
from kvoffd_client.vllm.settings import Settings
from tests.vllm.stand_ins import attention, cache_config, engine_config

ALGORITHMS = ("sha256", "sha256_cbor")
BLOCKS = ([1, 2, 3], [4, 5, 6])


def block_hashes(algorithm: str) -> list[str]:
    """The chain of vLLM itself over two blocks, from the root that it makes now."""
    hash_function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_function)
    first = kv_cache_utils.hash_block_tokens(hash_function, None, BLOCKS[0])
    second = kv_cache_utils.hash_block_tokens(hash_function, first, BLOCKS[1])
    return [first.hex(), second.hex()]


def identity(model: str) -> dict[str, Any]:
    """Before and after the connector has looked at the seed."""
    untouched = {algorithm: block_hashes(algorithm) for algorithm in ALGORITHMS}
    declared_before = hash_root.seed_field()
    settled = hash_root.settle_seed()
    hashes: dict[str, list[str]] = {}
    is_as_declared: dict[str, bool] = {}
    for algorithm in ALGORITHMS:
        hashes[algorithm] = block_hashes(algorithm)
        is_as_declared[algorithm] = hash_root.is_as_declared(algorithm)
    return {
        "untouched": untouched,
        "settled": settled,
        "hashes": hashes,
        "is_as_declared": is_as_declared,
        # The ranks' processes never settle anything, and must name the same root.
        "declared": [declared_before, hash_root.seed_field()],
        "namespace": make_namespace(
            engine_config(model), cache_config(), attention(), Settings(salt="a"), "vec 0123"
        ),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(identity(sys.argv[1])) + "\n")

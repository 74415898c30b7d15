"""The root of vLLM's chain of block hashes: equal in all engines, or nobody shares.

Up to 0.28 vLLM draws the root at random in each process unless PYTHONHASHSEED is
set (`init_none_hash` in v1/core/kv_cache_utils.py); every start of an engine would
then have other hashes and never a hit. vLLM reads the variable after it has made the
scheduler's connector, so the connector can still give it a value. With SHA-256 the
seed protects nothing: collisions cannot be made for any root.
"""

from __future__ import annotations

import os

from vllm.v1.core import kv_cache_utils

#: As if the user had set it so; engines with and without it share then.
STABLE_SEED = "0"
_SEED_VARIABLE = "PYTHONHASHSEED"


def draws_at_random() -> bool:
    """Whether this vLLM has another root in each process when nobody sets a seed."""
    return not hasattr(kv_cache_utils, "resolve_none_hash_seed")


def seed_field() -> str:
    """What names the root in the namespace; equal in all processes of an engine."""
    seed = os.environ.get(_SEED_VARIABLE)
    if seed is not None:
        return f"seed {seed}"
    return f"seed {STABLE_SEED}" if draws_at_random() else "the engine's own"


def settle_seed() -> bool:
    """Give the engine a stable root where it would draw one. True if that was needed.

    In the scheduler's process, before vLLM makes the root.
    """
    if not draws_at_random() or os.environ.get(_SEED_VARIABLE) is not None:
        return False
    os.environ[_SEED_VARIABLE] = STABLE_SEED
    return True


def is_as_declared(algorithm: str) -> bool:
    """Whether the root that vLLM made is the one that `seed_field` names."""
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415 - only where it is asked

    hash_function = get_hash_fn_by_name(algorithm)
    seed = os.environ.get(_SEED_VARIABLE)
    if seed is None:
        if draws_at_random():
            return False
        seed = kv_cache_utils.resolve_none_hash_seed(hash_function)
    root: bytes = kv_cache_utils.NONE_HASH
    expected: bytes = hash_function(seed)
    return root == expected

"""vLLM is imported here, before any test is: it warns of its own libraries while it loads."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec

# This very folder looks like a package of that name.
HAS_ENGINE = find_spec("torch") is not None
# Without an engine there is nothing to collect here; with one, only `-m vllm` selects it.
collect_ignore_glob = [] if HAS_ENGINE else ["test_*.py"]

if HAS_ENGINE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("connector", "layout"):
            import_module(f"kvoffd_client.vllm.{name}")

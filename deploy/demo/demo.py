#!/usr/bin/env python3
"""Watch a real vLLM recompute nothing that kvoffd holds: `python deploy/demo/demo.py`.

Owns a temporary folder and every process below it, and removes both however it ends. Runs
on one thread. Must be run by an interpreter that has vLLM, kvoffd[daemon] and the client.
Ends with 1 if a token differs from the run without the connector, or if a run that could
have taken blocks from kvoffd took none.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines import EngineError, EngineProcess, InterruptError, Interrupts, spawn
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE: Final = Path(__file__).resolve().parent
_OPENING_BYTES: Final = 4096
_PASSAGE_BYTES: Final = 1150
_PROMPTS: Final = 8
_QUESTION: Final = "\n\nQuestion: What happens next?\nAnswer:"
_ANSWER_TOKENS: Final = 24
_BLOCK_TOKENS: Final = 32
_MODEL_DEADLINE_S: Final = 120.0
_DAEMON_DEADLINE_S: Final = 30.0
_DAEMON_STOP_S: Final = 15.0
_PR_SET_CHILD_SUBREAPER: Final = 36
_UNIX_PATH_BYTES_MAX: Final = 107


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all prompts by one engine."""

    name: str
    expects_hits: bool
    first_token_s: tuple[float, ...]
    prompt_tokens: int
    own_tokens: int
    kvoffd_tokens: int
    tokens: tuple[tuple[int, ...], ...]


class Stage:
    """What the onlooker sees while it works: one line a step, and a spinner on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = 0

    @contextmanager
    def step(self, text: str, steps_total: int) -> Iterator[Any]:
        """Show text while the body runs, and how long it took."""
        self._done += 1
        label = f"[{self._done}/{steps_total}] {text}"
        began_s = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(label) as status:
                yield lambda detail: status.update(f"{label} - {detail}")
        else:
            self._console.print(label, markup=False)
            yield lambda _detail: None
        took_s = time.monotonic() - began_s
        self._console.print(f"{label}: {took_s:.1f} s", markup=False, highlight=False)


def prompts() -> list[list[int]]:
    """The story's opening, then one passage each, then the same question; tokens are bytes."""
    text = (_HERE / "alice.txt").read_bytes()
    found = []
    for number in range(_PROMPTS):
        begin = _OPENING_BYTES + number * _PASSAGE_BYTES
        passage = text[begin : begin + _PASSAGE_BYTES]
        found.append(list(text[:_OPENING_BYTES] + passage + _QUESTION.encode()))
    return found


class Demonstration:
    """The programme, in order; close() takes everything back at any point of it."""

    _STEPS: Final = 11

    def __init__(self, console: Console, interrupts: Interrupts, *, in_process: bool) -> None:
        self._stage = Stage(console)
        self._interrupts = interrupts
        self._in_process = in_process
        self.folder = _private_folder()
        self._model = self.folder / "model"
        self._socket_path = self.folder / "kvoffd.sock"
        self._daemon: subprocess.Popen[bytes] | None = None
        self.runs: list[Run] = []

    def play(self) -> None:
        """Raises: EngineError, InterruptError."""
        with self._stage.step("making a tiny Llama (random weights, float32)", self._STEPS):
            self._make_model()
        with self._stage.step("starting kvoffd", self._STEPS):
            self._start_daemon()
        engine = self._engine("baseline", "starting vLLM without the connector", connector=False)
        self._run(engine, "without kvoffd", expects_hits=False)
        engine.stop()
        engine = self._engine("first", "starting vLLM with kvoffd")
        self._run(engine, "cold", expects_hits=False)
        engine.ask("drop_cache")
        self._run(engine, "warm, own cache dropped", expects_hits=True)
        engine.stop()
        engine = self._engine("restarted", "starting vLLM again")
        self._run(engine, "warm, engine restarted", expects_hits=True)
        beside = self._engine("second", "starting a second vLLM beside it")
        self._run(beside, "second engine beside it", expects_hits=True)
        beside.stop()
        engine.stop()

    def close(self) -> None:
        """Stop the daemon, end every process below this one, remove the folder."""
        if self._daemon is not None and self._daemon.poll() is None:
            # Politely, so that it removes what it owns; its copiers follow it.
            self._daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._daemon.wait(_DAEMON_STOP_S)
        _end_descendants()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_model(self) -> None:
        log = self.folder / "model.log"
        child = spawn([sys.executable, str(_HERE / "tiny_llama.py"), str(self._model)], log)
        if self._wait_child(child, _MODEL_DEADLINE_S) != 0:
            raise EngineError(f"no model was made: {log.read_text(errors='replace')}")

    def _start_daemon(self) -> None:
        log = self.folder / "kvoffd.log"
        settings = {"KVOFFD_ARENA_BYTES": "512MiB", "TMPDIR": str(self.folder)}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFD_")}
        self._daemon = spawn(
            [sys.executable, "-m", "kvoffd.main", "serve", "--socket", str(self._socket_path)],
            log,
            environment | settings,
            ends_by=signal.SIGTERM,
        )
        ends_s = time.monotonic() + _DAEMON_DEADLINE_S
        while not _answers(self._socket_path):
            ended = self._daemon.poll() is not None
            if ended or time.monotonic() > ends_s:
                raise EngineError(f"kvoffd did not start: {log.read_text(errors='replace')}")
            self._interrupts.wait([], 0.05)

    def _engine(self, name: str, text: str, *, connector: bool = True) -> EngineProcess:
        with self._stage.step(text, self._STEPS):
            engine = EngineProcess(name, self.folder, self._interrupts, in_process=self._in_process)
            engine.start(self._options(connector=connector))
        return engine

    def _options(self, *, connector: bool) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": str(self._model),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 8192,
            "max_num_batched_tokens": 1024,
            "block_size": _BLOCK_TOKENS,
            "kv_cache_memory_bytes": 96 << 20,
            # Checked at start-up although the line above decides.
            "gpu_memory_utilization": 0.3,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        if connector:
            options["kv_transfer_config"] = {
                "kv_connector": "KvoffdConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "kvoffd_client.vllm",
                "kv_connector_extra_config": {"socket": str(self._socket_path)},
                "kv_load_failure_policy": "recompute",
            }
        return options

    def _run(self, engine: EngineProcess, name: str, *, expects_hits: bool) -> None:
        wanted = prompts()
        answers, own, taken = [], 0, 0
        with self._stage.step(f"{name}: {len(wanted)} prompts", self._STEPS) as show:
            for number, prompt in enumerate(wanted, 1):
                show(f"prompt {number} of {len(wanted)}")
                reply = engine.ask("generate", prompts=[prompt], max_tokens=_ANSWER_TOKENS)
                answers += reply["answers"]
                own += reply["counters"]["own_hit_tokens"]
                taken += reply["counters"]["external_hit_tokens"]
        self.runs.append(
            Run(
                name,
                expects_hits,
                tuple(answer["first_token_s"] for answer in answers),
                sum(map(len, wanted)),
                own,
                taken,
                tuple(tuple(answer["tokens"]) for answer in answers),
            )
        )

    def _wait_child(self, child: subprocess.Popen[bytes], deadline_s: float) -> int | None:
        ends_s = time.monotonic() + deadline_s
        while child.poll() is None and time.monotonic() < ends_s:
            self._interrupts.wait([], 0.05)
        return child.poll()


def table_of(runs: list[Run]) -> Table:
    """The one table; the first run is what all others are compared with."""
    table = Table(title="vLLM with kvoffd: the same prompts, run after run")
    table.add_column("run")
    table.add_column("first token,\nmedian ms", justify="right")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("from vLLM's\nown cache", justify="right")
    table.add_column("from\nkvoffd", justify="right")
    table.add_column("computed", justify="right")
    table.add_column("output\ntokens")
    for run in runs:
        table.add_row(
            run.name,
            f"{statistics.median(run.first_token_s) * 1e3:.1f}",
            str(run.prompt_tokens),
            str(run.own_tokens),
            str(run.kvoffd_tokens),
            str(run.prompt_tokens - run.own_tokens - run.kvoffd_tokens),
            "reference" if run is runs[0] else _comparison(runs[0], run),
        )
    return table


def failures_of(runs: list[Run]) -> list[str]:
    """Sentences on what must not be; empty when all is well."""
    found = [
        f"{run.name}: output tokens differ from the run without kvoffd"
        for run in runs[1:]
        if run.tokens != runs[0].tokens
    ]
    found += [
        f"{run.name}: no token was taken from kvoffd"
        for run in runs
        if run.expects_hits and run.kvoffd_tokens == 0
    ]
    return found


def _comparison(reference: Run, run: Run) -> str:
    return "equal" if run.tokens == reference.tokens else "DIFFERENT"


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvoffd-demo-"))
    if len(str(folder / "kvoffd.sock.handshake")) > _UNIX_PATH_BYTES_MAX:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="kvoffd-demo-", dir="/tmp"))
    return folder


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _end_descendants() -> None:
    """SIGKILL and reap until nothing is left: orphans come to this process (subreaper)."""
    while True:
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = [int(word) for word in (task / "children").read_text().split()]
            for child in children:
                found += [child, *_descendants(child)]
    return found


def main() -> int:
    """Play, print the table, leave nothing behind."""
    interrupts = Interrupts()
    interrupts.install()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--deployed-shape",
        action="store_true",
        help="run each engine as a server does, in three processes (slower to start)",
    )
    arguments = parser.parse_args()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    console = Console()
    demonstration = Demonstration(console, interrupts, in_process=not arguments.deployed_shape)
    try:
        demonstration.play()
    except InterruptError as reason:
        console.print(f"ended by {reason}; nothing is left behind")
        return 128 + (interrupts.number or 0)
    except EngineError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    finally:
        demonstration.close()
    console.print(table_of(demonstration.runs))
    failures = failures_of(demonstration.runs)
    for failure in failures:
        console.print(f"FAILED: {failure}", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""The benchmark: `make bench`, or `python -m tests.bench.bench [-o FILE]`.

Throughput through the whole path beside memcpy and the copier alone, all in one run and by
turns, so that a noisy machine is noisy for all of them; lookup round trips; and what a step
costs the engine's threads. Owns one daemon in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.copier_alone import CopierAlone
from tests.bench.machine import machine_shape
from tests.bench.memcpy import Memcpy
from tests.bench.step_time import StepTime
from tests.bench.whole_path import BenchInstance, BlockShape
from tests.engine.daemon import DaemonProcess

SHAPES = (
    BlockShape("32 layers x 64 KiB", 32, 64 << 10, blocks=512, job_blocks=64),
    BlockShape("4 layers x 8 KiB", 4, 8 << 10, blocks=32768, job_blocks=1024),
)
MEMCPY_BYTES = 512 << 20
LOOKUP_BLOCKS = 512
GIGA = 1e9
Figures = dict[str, object]


def throughput(socket_path: str, shape: BlockShape, rounds: int, console: Console) -> Figures:
    """Rounds of memcpy, copier alone, store, load; the medians and the best of each."""
    yardstick = Memcpy(MEMCPY_BYTES)
    instance = BenchInstance(socket_path, shape)
    alone = CopierAlone(shape, instance.pool)
    found: dict[str, list[float]] = {}

    def note(name: str, bytes_per_s: float) -> None:
        found.setdefault(name, []).append(bytes_per_s / GIGA)

    try:
        warm = instance.hashes("warm")
        instance.store(warm)
        instance.check_bytes(warm)
        alone.store()
        alone.load()
        for number in range(rounds):
            console.print(f"{shape.name}: round {number + 1} of {rounds}", highlight=False)
            instance.drop()
            hashes = instance.hashes(f"round {number}")
            note("memcpy, 1 thread", yardstick.bytes_per_s(1))
            note("memcpy, 2 threads", yardstick.bytes_per_s(2))
            note("copier alone, store", shape.total_bytes / alone.store())
            note("store", shape.total_bytes / instance.store(hashes))
            note("memcpy, 1 thread", yardstick.bytes_per_s(1))
            note("copier alone, load", shape.total_bytes / alone.load())
            note("load", shape.total_bytes / instance.load(hashes))
        instance.drop()
    finally:
        alone.close()
        instance.close()
    return {
        "shape": shape.name,
        "bytes": shape.total_bytes,
        "gb_per_s": {
            name: {"median": statistics.median(values), "best": max(values)}
            for name, values in found.items()
        },
    }


def lookups(socket_path: str, count: int) -> dict[str, Figures]:
    """Round trips of a lookup that hits LOOKUP_BLOCKS blocks, one at a time.

    Once while the engine's thread rests, as it does in a forward, and once while it runs pure
    Python: then each switch to the background thread may take the interpreter's 5 ms.
    """
    return {
        "engine's thread at rest": _lookups(socket_path, count, pause_s=20e-6),
        "engine's thread in Python": _lookups(socket_path, count, pause_s=0.0),
    }


def _lookups(socket_path: str, count: int, pause_s: float) -> Figures:
    shape = BlockShape("lookup", 1, 4096, blocks=LOOKUP_BLOCKS, job_blocks=LOOKUP_BLOCKS)
    instance = BenchInstance(socket_path, shape)
    times_s = []
    try:
        hashes = instance.hashes("lookup")
        instance.store(hashes)
        for number in range(count + 20):
            took_s, result = instance.timed_lookup(hashes, pause_s)
            assert result.hit_blocks == LOOKUP_BLOCKS, result
            instance.release(result)
            if number >= 20:  # the first ones warm interpreters and caches
                times_s.append(took_s)
        instance.drop()
    finally:
        instance.close()
    return _distribution(times_s) | {"blocks": LOOKUP_BLOCKS}


def steps(socket_path: str, count: int) -> dict[str, Figures]:
    """Engine-thread time a step in the halves, idle and with blocks to store."""
    measured = StepTime(socket_path)
    try:
        measured.run(50, working=True)
        return {
            "without work": _distribution(measured.run(count, working=False)),
            "with work": _distribution(measured.run(count, working=True)),
        }
    finally:
        measured.close()


def _distribution(times_s: list[float]) -> Figures:
    ordered = sorted(times_s)
    return {
        "samples": len(ordered),
        "median_us": statistics.median(ordered) * 1e6,
        "p99_us": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6,
        "max_us": ordered[-1] * 1e6,
    }


def show(results: dict[str, object], console: Console) -> None:
    """Two tables for people."""
    speeds = Table(title="GB/s (1e9 bytes of payload), median (best)")
    speeds.add_column("")
    shapes = results["throughput"]
    assert isinstance(shapes, list)
    for shape in shapes:
        speeds.add_column(shape["shape"], justify="right")
    for name in shapes[0]["gb_per_s"]:
        figures = [shape["gb_per_s"][name] for shape in shapes]
        speeds.add_row(name, *(f"{one['median']:.2f} ({one['best']:.2f})" for one in figures))
    for direction in ("store", "load"):
        speeds.add_row(
            f"{direction} / memcpy, 1 thread",
            *(
                f"{_median(shape, direction) / _median(shape, 'memcpy, 1 thread'):.2f}"
                for shape in shapes
            ),
        )
    console.print(speeds)
    times = Table(title="microseconds")
    for name in ("", "samples", "median", "p99", "max"):
        times.add_column(name, justify="left" if not name else "right")
    step_times = results["step"]
    assert isinstance(step_times, dict)
    lookup_times = results["lookup"]
    assert isinstance(lookup_times, dict)
    rows = {
        f"lookup of {LOOKUP_BLOCKS} blocks, {name}": figures
        for name, figures in lookup_times.items()
    } | {f"engine threads a step, {name}": figures for name, figures in step_times.items()}
    for name, figures in rows.items():
        assert isinstance(figures, dict)
        cells = (f"{figures[f'{one}_us']:.0f}" for one in ("median", "p99", "max"))
        times.add_row(name, str(figures["samples"]), *cells)
    console.print(times)


def _median(shape: Figures, name: str) -> float:
    speeds = shape["gb_per_s"]
    assert isinstance(speeds, dict)
    return float(speeds[name]["median"])


def main() -> int:
    """Measure, show, and write JSON when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lookups", type=int, default=500)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    console = Console()
    results: dict[str, object] = {"machine": machine_shape()}
    with tempfile.TemporaryDirectory(prefix="kvoffd-bench-") as folder:
        daemon = DaemonProcess(Path(folder), {"KVOFFD_ARENA_BYTES": "1280MiB"})
        daemon.start()
        try:
            path = str(daemon.socket_path)
            results["throughput"] = [
                throughput(path, shape, arguments.rounds, console) for shape in SHAPES
            ]
            console.print("lookups and steps", highlight=False)
            results["lookup"] = lookups(path, arguments.lookups)
            results["step"] = steps(path, arguments.steps)
        finally:
            daemon.stop()
    results["load_after"] = round(os.getloadavg()[0], 2)
    show(results, console)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The shape of the machine that figures belong to; no names of hosts or people."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


def machine_shape() -> dict[str, str | int]:
    """Cores, memory, kernel and versions."""
    memory_kib = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            memory_kib = int(line.split()[1])
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20)),
        "kernel": platform.release().split("-")[0],
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "grpcio": metadata.version("grpcio"),
        "kvoffd": metadata.version("kvoffd"),
        "load_before": round(os.getloadavg()[0], 2),
        "byte_order": sys.byteorder,
    }

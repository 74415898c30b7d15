"""How much memory there is for an arena. Reads /proc and the cgroup tree; changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Room(NamedTuple):
    """Memory that can be had before something is killed, and what sets the limit."""

    bytes_free: int
    limit_name: str


def measure_room(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> Room:
    """The tightest of what the machine and each of our cgroups have left."""
    rooms = [_of_machine(proc / "meminfo")]
    path = _cgroup_path(proc / "self" / "cgroup")
    if path is not None:
        folder = cgroup_root / path.lstrip("/")
        while True:
            room = _of_cgroup(folder)
            if room is not None:
                rooms.append(room)
            if folder == cgroup_root or cgroup_root not in folder.parents:
                break
            folder = folder.parent
    return min(rooms)


def _of_machine(meminfo: Path) -> Room:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return Room(int(value.split()[0]) * 1024, "MemAvailable of /proc/meminfo")
    raise OSError(f"{meminfo} has no MemAvailable.")


def _cgroup_path(membership: Path) -> str | None:
    """Our path in the unified hierarchy; None where there is none."""
    for line in membership.read_text().splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return None


def _of_cgroup(folder: Path) -> Room | None:
    """What is left below memory.max; clean file pages count as free. None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used_bytes = int((folder / "memory.current").read_text())
        statistics = (folder / "memory.stat").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if limit == "max":
        return None
    for line in statistics.splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            used_bytes -= int(value)
    return Room(max(0, int(limit) - used_bytes), f"memory.max of {folder}")

"""Which device a name means. Runs in a copier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.devices.base import check_device_name
from kvoffd.devices.cpu import CpuDevice

if TYPE_CHECKING:
    from kvoffd.devices.base import Device


def open_device(name: str, arena_fd: int, arena_bytes: int) -> Device:
    """Open the device of this name over the arena's data.

    Raises:
        BadRequest: the name cannot be served.
        MemoryRefused: the arena cannot be mapped.
    """
    check_device_name(name)
    return CpuDevice(arena_fd, arena_bytes)

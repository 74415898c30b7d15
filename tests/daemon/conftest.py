"""Fixtures: a daemon for a file of tests, and one for a single test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.daemon_process import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests of a file: whatever one of them breaks, the next one sees."""
    process = DaemonProcess(tmp_path_factory.mktemp("d"))
    process.start()
    yield process
    process.end()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon for one test, not started."""
    process = DaemonProcess(tmp_path)
    yield process
    process.end()

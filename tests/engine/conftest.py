"""The daemon and the engine processes that the tests of this folder share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.engine.crew import Crew
from tests.engine.daemon import DaemonProcess
from tests.engine.settings import SMALL_ARENA

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def _crew(folder: Path) -> Iterator[Crew]:
    daemon = DaemonProcess(folder, SMALL_ARENA)
    daemon.start()
    found = Crew(daemon, folder)
    try:
        yield found
    finally:
        found.close()
        status = daemon.stop()
    assert status == 0, daemon.last_words()


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """One real daemon with little room, and three engine processes, from seed to seed."""
    with _crew(tmp_path_factory.mktemp("crew")) as found:
        yield found


@pytest.fixture
def fresh_crew(tmp_path: Path) -> Iterator[Crew]:
    """The same for one test, which may kill any of them."""
    with _crew(tmp_path) as found:
        yield found

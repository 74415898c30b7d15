"""What the daemon must say about itself between two acts of an engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.engine.daemon import wait_a_little
from tests.engine.status import daemon_status, not_idle

if TYPE_CHECKING:
    from deploy.demo.engines import EngineProcess
    from tests.engine.daemon import DaemonProcess

# Dead engines are to be cleaned up within seconds; a lease lasts longer than that.
IDLE_DEADLINE_S = 10.0
STORED_DEADLINE_S = 20.0


def status_of(daemon: DaemonProcess) -> dict[str, Any]:
    return daemon_status(daemon.socket_path)


def assert_idle(daemon: DaemonProcess) -> None:
    """Soon after the last engine has gone nothing is held, leased, pending or in flight."""
    ends_s = time.monotonic() + IDLE_DEADLINE_S
    while (left := not_idle(status_of(daemon))) and time.monotonic() < ends_s:
        wait_a_little(0.05)
    assert left == {}, f"{left}\n{daemon.last_words()}"


def wait_until_stored(daemon: DaemonProcess, engine: EngineProcess) -> None:
    """Until the daemon has settled all that the engine has handed over."""
    ends_s = time.monotonic() + STORED_DEADLINE_S
    while True:
        engine.ask("settle")
        ledger = status_of(daemon)["ledger"]
        if ledger["submitted"] > 0 and ledger["in_flight"] == 0:
            return
        assert time.monotonic() < ends_s, f"still in flight: {ledger}\n{daemon.last_words()}"
        wait_a_little(0.05)

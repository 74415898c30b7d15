"""The connector's settings, out of kv_connector_extra_config.

Pure. Unknown names are refused: a misspelt salt must not be a missing one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Refusal(Exception):
    """This engine runs without offload; the message says what is in the way, and why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a user may set for the connector."""

    #: Path of the daemon's gRPC socket; KVOFFD_SOCKET or the default when absent.
    socket: str | None = None
    #: Engines with different salts never share a block.
    salt: str = ""
    #: Names the weights instead of their files' fingerprint.
    weights_tag: str | None = None
    #: Raise on a hook called out of order; for tests.
    strict: bool = False
    # All that a request may wait for lookups. A lookup takes 1-15 ms beside a busy
    # scheduler thread; smaller, and a scheduling hiccup turns hits into misses.
    lookup_deadline_s: float = 0.5
    # From hand-over to the moment at which a load is given up.
    load_deadline_s: float = 5.0
    # How long the daemon may be silent before the session is given up; shorter, and a machine
    # whose cores are all busy loses sessions to a daemon that is well.
    heartbeat_timeout_s: float = 10.0
    # How long the engine's start may wait for a daemon that is there; steps never wait, and an
    # absent daemon is known at once.
    start_wait_s: float = 5.0
    # Jobs under way at a time on one rank. Fewer, and a burst of stores is refused.
    ticket_cells: int = 4096

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises Refusal for an unknown name or a value of the wrong kind."""
        values: dict[str, Any] = {}
        for name, value in extra.items():
            kinds = _KINDS.get(name)
            if kinds is None:
                known = ", ".join(sorted(_KINDS))
                raise Refusal(f"kv_connector_extra_config has no setting {name!r}; known: {known}")
            if isinstance(value, bool) is not (kinds is bool) or not isinstance(value, kinds):
                raise Refusal(f"kv_connector_extra_config: {name} cannot be {value!r}")
            low, high = _BOUNDS.get(name, (None, None))
            if low is not None and not low <= value <= high:
                raise Refusal(f"kv_connector_extra_config: {name} is from {low} to {high}")
            values[name] = value
        return cls(**values)


_KINDS: dict[str, Any] = {
    "socket": str,
    "salt": str,
    "weights_tag": str,
    "strict": bool,
    "lookup_deadline_s": (int, float),
    "load_deadline_s": (int, float),
    "heartbeat_timeout_s": (int, float),
    "start_wait_s": (int, float),
    "ticket_cells": int,
}
_BOUNDS: dict[str, tuple[Any, Any]] = {
    "lookup_deadline_s": (0.03, 60.0),
    "load_deadline_s": (0.1, 600.0),
    "heartbeat_timeout_s": (1.0, 600.0),
    "start_wait_s": (0.0, 60.0),
    "ticket_cells": (64, 65_536),
}

"""The switch that keeps a fault of ours out of the engine.

Owned by one half, on its thread. A cache must never be the reason that an
engine ends: a fault is logged once with its traceback and turns the half off.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("kvoffd_client.engine")


class MisuseError(Exception):
    """Strict mode only: the hooks were called in an order, or with values, that cannot be."""


class Guard:
    """Off or on, and how often the half was used in a way that cannot be right."""

    def __init__(self, half: str, *, strict: bool) -> None:
        self._half = half
        self.strict = strict
        self.is_off = False
        self.misuses = 0

    def misuse(self, sentence: str) -> None:
        """Count a call that makes no sense; strict, raise it.

        Raises:
            MisuseError: in strict mode.
        """
        self.misuses += 1
        if self.strict:
            raise MisuseError(f"{self._half}: {sentence}")
        if self.misuses == 1:
            logger.warning("kvoffd: %s: %s (said once)", self._half, sentence)

    def turn_off(self, hook: str) -> None:
        """Call while handling an exception: log it once and switch off; strict, raise it again."""
        if self.strict:
            raise  # noqa: PLE0704 - called from an except clause, by contract
        if not self.is_off:
            self.is_off = True
            logger.error(
                "kvoffd: internal error in %s of the %s; it is off from now on: "
                "the engine goes on without offload",
                hook,
                self._half,
                exc_info=sys.exception(),
            )

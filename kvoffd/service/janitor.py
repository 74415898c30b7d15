"""Janitor: what has to happen because time has passed.

Owns one task on the loop thread. Looks at deadlines of leases, stores and loads; the
clock is the one that all services were given.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffd.core.cache import Cache
    from kvoffd.service.load import LoadService
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.store import StoreService

log = structlog.get_logger(__name__)


class Janitor:
    """Turns every janitor_interval_s until it is stopped."""

    def __init__(
        self,
        cache: Cache,
        stores: StoreService,
        loads: LoadService,
        options: ServiceOptions,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._stores = stores
        self._loads = loads
        self._options = options
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="janitor")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def turn(self) -> None:
        """One look at all deadlines."""
        now_s = self._clock()
        self._stores.apply(self._cache.expire(now_s))
        self._loads.expire(now_s)
        if self._options.check_invariants:
            self._cache.check_invariants()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._options.janitor_interval_s)
            try:
                self.turn()
            except Exception:
                # Without a janitor leases would hold blocks for ever: report, go on.
                log.exception("janitor failed")

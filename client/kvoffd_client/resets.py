"""Resets that are asked, and resets that are owed.

`asked` is written by the scheduler's thread alone, `paid` by the background loop
alone; a reset is owed while the one is ahead of the other. One call to the
daemon pays for all that were asked before it left.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class ResetWaiter:
    """What a scheduler's thread waits for, bounded."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = threading.Event()
        self.is_confirmed = False

    def end(self, *, is_confirmed: bool) -> None:
        self.is_confirmed = is_confirmed
        self.ended.set()


class ResetDebt:
    """How many resets were asked, how many are confirmed, and who waits for which."""

    def __init__(self) -> None:
        self._asked = 0
        self._paid = 0
        self._waiters: list[ResetWaiter] = []
        self._wake = asyncio.Event()

    @property
    def is_owed(self) -> bool:
        return self._paid < self._asked

    def ask(self) -> ResetWaiter:
        """One more is owed from this moment on. On the scheduler's thread."""
        self._asked += 1
        return ResetWaiter(self._asked)

    def enter(self, waiter: ResetWaiter) -> None:
        """Have the waiter told, and the debt paid soon. On the loop, as all below."""
        if waiter.number <= self._paid:  # by the call for an earlier one
            waiter.end(is_confirmed=True)
            return
        self._waiters.append(waiter)
        self._wake.set()

    async def pay_forever(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call the daemon whenever something is owed; what it raises ends this, too."""
        while True:
            self._wake.clear()
            while self.is_owed:
                # What is asked while the call is on its way needs a call of its own.
                asked = self._asked
                await call()
                self._paid = asked
                self._tell_paid()
            await self._wake.wait()

    def _tell_paid(self) -> None:
        waiting, self._waiters = self._waiters, []
        for waiter in waiting:
            if waiter.number <= self._paid:
                waiter.end(is_confirmed=True)
            else:
                self._waiters.append(waiter)

    def connection_lost(self) -> None:
        """Nobody need wait any longer; what is owed stays owed."""
        waiting, self._waiters = self._waiters, []
        for waiter in waiting:
            waiter.end(is_confirmed=False)

"""Two ways to await tasks that never wait longer than they say. On the background loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

# Cancelled tasks end in a turn of the loop or two; one that does not is left behind.
TEARDOWN_S = 0.5


async def race(work: Awaitable[None], ended: asyncio.Future[None]) -> None:
    """Await the work, unless the connection ends first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        await task
    finally:
        await cancel_all([task])


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel and await, bounded; what they still raise is of no interest."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=TEARDOWN_S)
    for task in done:
        if not task.cancelled():
            task.exception()

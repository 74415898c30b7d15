"""One writer gets every outcome once, in few messages, and learns when there will be no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvoffd.service.streams import LoadOutcome, LoadStatus, RankStream, StoreOutcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def store(job_id: int) -> StoreOutcome:
    return StoreOutcome(job_id, 1, 0, ())


def test_all_that_is_there_comes_at_once() -> None:
    async def scenario() -> None:
        stream = RankStream(1)
        taking = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        assert not taking.done()
        stream.post_store(store(1))
        stream.post_store(store(2))
        stream.post_load(LoadOutcome(3, LoadStatus.LOADED))
        outcomes = await taking
        assert outcomes is not None
        assert [outcome.job_id for outcome in outcomes.stores] == [1, 2]
        assert [outcome.job_id for outcome in outcomes.loads] == [3]
        assert stream.outcomes_waiting == 0

    run(scenario)


def test_close_delivers_what_was_posted_and_drops_what_is_posted_later() -> None:
    async def scenario() -> None:
        stream = RankStream(1)
        stream.post_store(store(1))
        stream.close("first")
        stream.close("second")
        stream.post_store(store(2))
        stream.post_load(LoadOutcome(3, LoadStatus.LOADED))
        outcomes = await stream.take()
        assert outcomes is not None
        assert [outcome.job_id for outcome in outcomes.stores] == [1]
        assert outcomes.loads == []
        assert await stream.take() is None
        assert stream.close_reason == "first"

    run(scenario)


def test_goodbye_waits_for_the_last_job() -> None:
    async def scenario() -> None:
        stream = RankStream(1)
        stream.jobs_in_flight = 2
        taking = asyncio.ensure_future(stream.take())
        stream.say_goodbye()
        await asyncio.sleep(0)
        assert not taking.done()
        stream.post_store(store(1))
        assert await taking is not None
        taking = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        assert not taking.done()
        stream.post_store(store(2))
        assert await taking is not None
        assert await stream.take() is None
        assert stream.close_reason

    run(scenario)

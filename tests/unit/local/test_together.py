"""Work that runs at once: results in order, and an error that callers can catch."""

import asyncio

import pytest

from outrider.core.errors import EngineUnavailable
from outrider.local.together import together


async def test_results_come_in_order() -> None:
    released = asyncio.Event()

    async def first() -> int:
        await released.wait()
        return 1

    async def second() -> int:
        released.set()
        return 2

    assert await together([first(), second()]) == [1, 2]
    assert await together([]) == []


async def test_the_first_error_is_raised_by_itself_and_ends_the_others() -> None:
    ended = []

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waiting")

    async def failing() -> None:
        raise EngineUnavailable("lost")

    with pytest.raises(EngineUnavailable, match="lost"):
        await together([waiting(), failing(), failing()])
    assert ended == ["waiting"]


async def test_a_cancelled_caller_is_no_error() -> None:
    task = asyncio.create_task(together([asyncio.sleep(60)]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

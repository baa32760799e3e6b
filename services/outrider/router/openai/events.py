"""The events of one HTTP request: those of all its prompts, as they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from outrider.core.generation import Caller, GenerationEvent
from outrider.core.ports import GenerationService
from outrider.core.result import GenerationResult, collect
from outrider.router.openai.requests import Call

__all__ = ["PromptEvent", "results_of", "stream_of"]

_QUEUE_EVENTS = 64
"""Events that wait for a slow client here; more wait in the service, which is bounded as well."""

PromptEvent = tuple[int, GenerationEvent]


async def results_of(service: GenerationService, call: Call, caller: Caller) -> list[GenerationResult]:
    """Run every prompt to its end, together; the first error ends all."""
    streams = [_closable(service.stream(one, caller)) for one in call.requests]

    async def whole(stream: AsyncGenerator[GenerationEvent, None]) -> GenerationResult:
        async with aclosing(stream) as events:
            return await collect(events)

    tasks = [asyncio.create_task(whole(one)) for one in streams]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stream_of(service: GenerationService, call: Call, caller: Caller) -> AsyncGenerator[PromptEvent, None]:
    """Events of all prompts, each with the number of its prompt. Closing it aborts all."""
    if len(call.requests) == 1:
        async with aclosing(_closable(service.stream(call.requests[0], caller))) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[PromptEvent | BaseException | None] = asyncio.Queue(_QUEUE_EVENTS)

    async def forward(prompt: int, stream: AsyncGenerator[GenerationEvent, None]) -> None:
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    await queue.put((prompt, event))
        except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [
        asyncio.create_task(forward(prompt, _closable(service.stream(one, caller))))
        for prompt, one in enumerate(call.requests)
    ]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _closable(events: AsyncIterator[GenerationEvent]) -> AsyncGenerator[GenerationEvent, None]:
    """Every service streams from a generator; closing it is what aborts the request."""
    return cast("AsyncGenerator[GenerationEvent, None]", events)

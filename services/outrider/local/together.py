"""Several pieces of work at once, whose first error is raised as it is."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["together"]

T = TypeVar("T")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first error ends the others and is raised by itself.

    A task group alone would raise a group of errors, which `except OutriderError` does not catch.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]

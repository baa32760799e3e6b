"""Waiting for a deployment's draft: a service is ready without it."""

import asyncio

from outrider.rpc.client import OutriderClient

__all__ = ["wait_until_drafting"]


async def wait_until_drafting(client: OutriderClient, timeout_s: float = 60.0) -> None:
    """Return once some engine is connected to a draft."""
    async with asyncio.timeout(timeout_s):
        while not await _drafting(client):  # noqa: ASYNC110 - the other end is another process
            await asyncio.sleep(0.1)


async def _drafting(client: OutriderClient) -> bool:
    return any(link.connected for engine in await client.speculation_status() for link in engine.draft_links)

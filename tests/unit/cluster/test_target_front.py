"""The front of a target replica over made-up ranks: when Serve is told to try another place."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from ray import serve

from outrider.core.errors import EngineUnavailable
from outrider_cluster import target_deployment
from outrider_cluster.settings import parse_settings
from outrider_cluster.target_deployment import TargetFront

pytestmark = pytest.mark.timeout(30)

SETTINGS = """
engine: scripted
model: {name: scripted, dtype: float32, max_model_len: 64}
target:
  kv: {block_size: 16, num_blocks: 8}
  timeouts: {rebuild_backoff_s: 0.001, rebuild_backoff_max_s: 600}
"""


class Ranks:
    """A group that serves at once and lives until it is told to die."""

    num_ranks = 1

    def __init__(self) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> str:
        return "h:1"

    async def ended(self, rank: int) -> str:
        return await asyncio.shield(self.death)

    async def ping(self, rank: int) -> None:
        return None

    async def drain(self) -> None:
        return None

    async def close(self, cause: str) -> None:
        return None


class NoSink:
    """Keeps no metrics: Ray does not run here."""

    def add(self, *_: object) -> None:
        return None

    set = observe = add


class Front(TargetFront):
    """The front, without Ray's actors."""

    groups: list[Ranks]

    def _make_group(self, epoch: int) -> Ranks:  # type: ignore[override]
        self.groups.append(Ranks())
        return self.groups[-1]

    async def _others_serve(self) -> bool:
        return False

    def __del__(self) -> None:  # type: ignore[override]
        """Serve calls the front's, and waits for it; Python would not wait."""

    async def lose(self) -> None:
        """Lose the group that serves now, and wait until the next one serves."""
        before = len(self.groups)
        self.groups[-1].death.set_result("out of memory")
        async with asyncio.timeout(20):
            while len(self.groups) == before or not (await self.describe()).ready:
                await self.wait_for_change(await self.describe(), 1.0)


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="front-1"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(target_deployment, "RayMetricSink", NoSink)
    monkeypatch.setattr(target_deployment, "configure_logs", lambda *_: None)
    made = Front(None)
    made.groups = []
    await made.reconfigure(parse_settings(SETTINGS, origin="test").model_dump(mode="json"))
    async with asyncio.timeout(20):
        while not (await made.describe()).ready:
            await made.wait_for_change(await made.describe(), 1.0)
    yield made
    await made._stop()


async def test_a_group_that_serves_and_dies_at_once_counts_until_serve_tries_another_place(front: Front) -> None:
    for lost in range(1, 6):
        await front.lose()
        assert (await front.describe()).failures_in_a_row == lost
        await front.check_health()  # it serves, so it stays
    hold = asyncio.get_running_loop().create_future()
    front._supervisor._start = lambda group: hold  # type: ignore[union-attr, method-assign, return-value]
    front.groups[-1].death.set_result("out of memory")
    async with asyncio.timeout(20):
        while (await front.describe()).ready:
            await front.wait_for_change(await front.describe(), 1.0)
    with pytest.raises(EngineUnavailable, match="6 failures in a row; the last one: rank 0: out of memory"):
        await front.check_health()
    hold.cancel()

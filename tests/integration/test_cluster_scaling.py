"""Emulated devices on a local Ray cluster: replicas follow the load, and no change costs a request.

One engine alone is soon full here; its device is slow enough that four of them wait for their devices and
not for one another. Everything is waited for by what it shows, nothing by the clock.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest
from tests.support.drafting import wait_until_drafting
from tests.support.served import Served, served

from outrider.core.dispatch import EngineStatus
from outrider.core.generation import GenerationRequest
from outrider.core.result import GenerationResult
from outrider.core.speculation import SpeculationReason
from outrider.rpc.client import OutriderClient

pytestmark = pytest.mark.timeout(420)

CONFIG = """\
engine: emulated
model: {name: emulated-test, max_model_len: 2048}
emulated: {acceptance: 0.8, slowdown: 3}
target:
  kv: {block_size: 16, num_blocks: 2048}
  max_num_seqs: 8
  cpus_per_rank: 0.1
  max_surge_percent: 100
  autoscaling:
    # Three sequences for each engine.
    {min_replicas: 1, max_replicas: 4, target_load: 0.375, upscale_delay_s: 1, downscale_delay_s: 3,
     measure_interval_s: 0.5, look_back_s: 2, target_queue_s: 60}
  timeouts: {start_s: 120, heartbeat_interval_s: 0.25}
draft:
  kv: {block_size: 16, num_blocks: 8192}
  num_cpus: 0.1
  autoscaling:
    {min_replicas: 1, max_replicas: 2, target_load: 2, upscale_delay_s: 1, downscale_delay_s: 3,
     measure_interval_s: 0.5, look_back_s: 2}
speculation: {max_num_draft_tokens: 4, batch_size_threshold: 4, batch_size_hysteresis: 1, max_draft_wait_ms: 500}
data_plane: {host: 127.0.0.1}
ray: {graceful_shutdown_s: 60}
"""
STREAMS = 12
MANY_REPLICAS_S = 180


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("emulated")
    config = folder / "emulated.yaml"
    config.write_text(CONFIG)
    with served(config, folder / "serve.log") as made:
        yield made


@pytest.fixture
async def client(cluster: Served) -> AsyncIterator[OutriderClient]:
    async with OutriderClient(cluster.address) as made:
        yield made


def request(number: int, *, max_tokens: int = 48) -> GenerationRequest:
    return GenerationRequest(text=f"{number:04d} is the number of a text", max_tokens=max_tokens, temperature=0.0)


class Load:
    """Streams that run one request after another until told to stop. None may fail or give another text."""

    def __init__(self, client: OutriderClient, streams: int = STREAMS) -> None:
        self._client = client
        self._streams = streams
        self._over = asyncio.Event()
        self.results: list[tuple[int, GenerationResult]] = []

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._stream(first)) for first in range(self._streams)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _stream(self, first: int) -> None:
        number = first
        while not self._over.is_set():
            self.results.append((number, await self._client.generate(request(number))))
            number += self._streams

    async def check(self) -> None:
        """Every text is the one that the request gives alone."""
        # What is checked is enough, not all: the fixed first requests of every stream, and the last ones.
        chosen = dict([*self.results[: self._streams], *self.results[-self._streams :]])
        for number, result in chosen.items():
            alone = await self._client.generate(request(number))
            assert result.choices[0].token_ids == alone.choices[0].token_ids


async def wait_for(client: OutriderClient, wanted: Callable[[Sequence[EngineStatus]], bool]) -> Sequence[EngineStatus]:
    """Ask for the state of the engines until it is as wanted."""
    engines: Sequence[EngineStatus] = ()
    try:
        async with asyncio.timeout(MANY_REPLICAS_S):
            while not wanted(engines := await client.speculation_status()):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"never came: {engines}")
    return engines


def ready(engines: Sequence[EngineStatus]) -> int:
    return sum(one.ready for one in engines)


async def test_it_says_that_it_is_emulated(client: OutriderClient) -> None:
    assert (await client.model_info()).model == "emulated-test"
    await wait_until_drafting(client)
    end = (await client.generate(request(1))).choices[0].end
    assert end.speculation.stats.speculative_rounds > 0


async def test_a_burst_closes_the_gate_then_adds_engines_and_both_come_back(client: OutriderClient) -> None:
    await wait_for(client, lambda engines: ready(engines) == 1)
    await wait_until_drafting(client)
    async with Load(client) as load:
        await wait_for(client, lambda engines: any(one.reason is SpeculationReason.BATCH_TOO_LARGE for one in engines))
        await wait_for(client, lambda engines: ready(engines) == 4)
        await wait_for(client, lambda engines: all(one.reason is SpeculationReason.ON for one in engines if one.ready))
        # Four streams that are under way when engines are taken away, and longer than that takes to decide.
        long = [asyncio.create_task(client.generate(request(9000 + i, max_tokens=600))) for i in range(4)]
    engines = await wait_for(client, lambda engines: ready(engines) == 1)
    assert any("leaving" in one.problem for one in engines) or len(engines) == 1
    results = await asyncio.gather(*long)
    await load.check()
    for i, result in enumerate(results):
        alone = await client.generate(request(9000 + i, max_tokens=600))
        assert result.choices[0].token_ids == alone.choices[0].token_ids
    reasons = [result.choices[0].end.speculation.reason for _, result in load.results]
    assert SpeculationReason.BATCH_TOO_LARGE in reasons
    assert reasons.index(SpeculationReason.BATCH_TOO_LARGE) < STREAMS, "the first of the burst already"
    assert SpeculationReason.ON in reasons[-STREAMS:]


async def test_another_draft_takes_over_while_the_targets_go_on(client: OutriderClient, cluster: Served) -> None:
    await wait_until_drafting(client)
    before = await wait_for(client, lambda engines: ready(engines) == 1)
    incarnation = before[0].draft_links[0].incarnation
    async with Load(client, streams=2) as load:
        cluster.reload(CONFIG.replace("draft:\n", "draft:\n  model: another\n"))
        await wait_for(
            client,
            lambda engines: any(
                link.connected and link.incarnation != incarnation for one in engines for link in one.draft_links
            ),
        )
        after = await wait_for(client, lambda engines: any(one.reason is SpeculationReason.ON for one in engines))
        done = len(load.results)
        async with asyncio.timeout(60):
            while len(load.results) < done + 4:  # noqa: ASYNC110 - the streams run by themselves
                await asyncio.sleep(0.05)
    assert [one.engine_id for one in after] == [one.engine_id for one in before]
    await load.check()
    assert load.results[-1][1].choices[0].end.speculation.stats.speculative_rounds > 0


async def test_new_replicas_take_over_under_load_without_a_failed_request(
    client: OutriderClient, cluster: Served
) -> None:
    (before,) = await wait_for(client, lambda engines: ready(engines) == 1)
    async with Load(client, streams=2) as load:
        cluster.reload(CONFIG.replace("max_num_seqs: 8", "max_num_seqs: 16"))
        await wait_for(
            client, lambda engines: ready(engines) >= 1 and before.engine_id not in {one.engine_id for one in engines}
        )
    await load.check()
    assert len(load.results) > 4

"""Changes under load, over real gRPC with the scripted engine: no request fails, no text is another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.fleet import Fleet, fleet

from outrider.core.generation import GenerationRequest
from outrider.core.result import GenerationResult
from outrider.core.speculation import SpeculationReason
from outrider_cluster.settings import Settings, load_settings

pytestmark = pytest.mark.timeout(90)

SERVE = Path(__file__).parents[2] / "infra" / "serve"
STREAMS = 6


def scripted(**sections: dict[str, object]) -> Settings:
    values = load_settings(SERVE / "scripted.yaml").model_dump(mode="json")
    values["target"]["tensor_parallel_size"] = 1
    for name, section in sections.items():
        values[name] |= section
    return Settings.model_validate(values)


def request(number: int) -> GenerationRequest:
    """Greedy and sampled requests by turns, of a few dozen tokens."""
    return GenerationRequest(
        text=f"TEXT {number}",
        max_tokens=20 + number % 40,
        seed=number,
        temperature=0.9 * (number % 2),
        traffic_class="batch" if number % 3 else "",
    )


class Load:
    """What the streams have brought so far."""

    def __init__(self) -> None:
        self.results: dict[int, GenerationResult] = {}
        self.moved = asyncio.Event()

    async def more(self, count: int) -> None:
        """Return when so many further requests have ended."""
        wanted = len(self.results) + count
        while len(self.results) < wanted:
            self.moved.clear()
            await self.moved.wait()


@asynccontextmanager
async def load(fleet: Fleet) -> AsyncIterator[Load]:
    """Streams that run one request after another. The first error of any of them fails the test."""
    made, over = Load(), asyncio.Event()

    async def stream(number: int) -> None:
        while not over.is_set():
            made.results[number] = await fleet.generate(request(number))
            made.moved.set()
            number += STREAMS

    async with asyncio.TaskGroup() as tasks:
        for first in range(STREAMS):
            tasks.create_task(stream(first))
        yield made
        over.set()


async def texts_are_right(fleet: Fleet, made: Load) -> None:
    """The same requests again, undisturbed; the formula's texts depend on nothing else."""
    places = asyncio.Semaphore(64)

    async def again(number: int) -> GenerationResult:
        async with places:
            return await fleet.generate(request(number))

    undisturbed = await asyncio.gather(*map(again, made.results))
    for (number, result), other in zip(made.results.items(), undisturbed, strict=True):
        assert result.choices[0].token_ids == other.choices[0].token_ids, number


async def test_engines_are_replaced_one_by_one() -> None:
    async with fleet(scripted(), targets=["a1", "b1"], drafts=1) as made:
        async with load(made) as under:
            await under.more(10)
            for old, new in (("a1", "a2"), ("b1", "b2")):
                await made.add_target(new, scripted(target={"max_num_seqs": 5}))
                await made.retire_target(old)
                await under.more(10)
        assert {one.engine_id for one in await made.router.speculation_status()} == {"a2", "b2"}
        await texts_are_right(made, under)


async def test_engines_are_replaced_where_there_is_no_room_for_both() -> None:
    async with fleet(scripted(), targets=["a1", "b1"]) as made:
        async with load(made) as under:
            for old, new in (("a1", "a2"), ("b1", "b2")):
                await under.more(6)
                await made.retire_target(old)
                await under.more(6)
                await made.add_target(new)
        await texts_are_right(made, under)


async def test_a_leaving_engine_gets_nothing_more_and_says_why() -> None:
    async with fleet(scripted(), targets=["a", "b"]) as made:
        long = asyncio.create_task(made.generate(GenerationRequest(text="LONG", max_tokens=3000, temperature=0.0)))
        async with asyncio.timeout(20):
            while sum(one.running for one in await made.router.speculation_status()) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        (busy,) = [one.engine_id for one in await made.router.speculation_status() if one.running]
        leaving = asyncio.create_task(made.retire_target(busy))
        async with asyncio.timeout(20):
            while not (gone := [one for one in await made.router.speculation_status() if not one.ready]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert "leaving" in gone[0].problem
        for number in range(4):
            await made.generate(request(number))
        assert (await long).choices[0].end.usage.completion_tokens == 3000
        await leaving


async def test_a_draft_is_swapped_and_no_target_notices_more_than_plain_rounds() -> None:
    async with fleet(scripted(), targets=["a", "b"], drafts=1) as made:
        old = made._drafts[0]
        async with load(made) as under:
            await under.more(10)
            await made.retire_draft(old)
            await under.more(10)
            async with asyncio.timeout(20):
                while SpeculationReason.ON in {one.reason for one in await made.router.speculation_status()}:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            plain = await made.generate(request(10_000))
            assert plain.choices[0].end.speculation.stats.speculative_rounds == 0
            await made.add_draft(scripted(draft={"model": "another", "max_num_seqs": 64}))
            await made.wait_until_drafting(2)
            await under.more(10)
        last = await made.generate(request(10_001))
        assert last.choices[0].end.speculation.stats.speculative_rounds > 0
        assert {one.engine_id for one in await made.router.speculation_status()} == {"a", "b"}
        await texts_are_right(made, under)


async def test_targets_spread_over_the_drafts_there_are_and_no_text_changes() -> None:
    async with fleet(scripted(), targets=["a", "b", "c", "d"], drafts=1) as made:
        first = made._drafts[0]
        assert first.links == 4
        async with load(made) as under:
            await under.more(6)
            second = await made.add_draft()
            await made.wait_until_balanced([2, 2])
            await under.more(6)
            for _ in range(5):
                made.look()
                await under.more(1)
            assert (first.links, second.links) == (2, 2)
            await made.retire_draft(first)
            await made.wait_until_balanced([4])
            await made.wait_until_drafting(4)
            await under.more(6)
        await texts_are_right(made, under)


async def test_policies_change_live_under_load() -> None:
    changes: list[dict[str, object]] = [
        {"preference": "off"},
        {"preference": "on", "max_num_draft_tokens": 1},
        {"batch_size_threshold": 0, "preference": "auto"},
        {"mode": "cached", "max_num_draft_tokens": 7},
        {"mode": "auto", "classes": {"batch": {"preference": "off"}}},
        {"max_num_draft_tokens": 0},
        {},
    ]
    async with fleet(scripted(), targets=["a"], drafts=1) as made:
        async with load(made) as under:
            for change in changes:
                made.update(scripted(speculation=change))
                await under.more(8)
        await texts_are_right(made, under)

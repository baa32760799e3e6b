"""Requests whose engine is lost under way: moved, waited for, given up. Fake engines, turned time."""

import asyncio
from typing import Any

import pytest
from tests.unit.router.byte_codec import EOS, ids
from tests.unit.router.fakes import LENGTH, STOP, FakeEngine, World, delta, request, settle, until
from tests.unit.router.test_service import CountingMetrics

from outrider.core.dispatch import SequenceDelta, SequenceEnd, SequenceErrorCode, SequenceSubmit, Timings
from outrider.core.errors import ConfigError, DeadlineExceeded, EngineUnavailable, InvalidRequest, RequestAborted
from outrider.core.generation import Caller
from outrider.core.sequence import Finish, FinishReason
from outrider.core.speculation import SpeculationChoice, VerificationRule
from outrider.core.verdict import TokenLogprobs
from outrider.router.run import FailoverSettings
from outrider.router.service import ServiceSettings

pytestmark = pytest.mark.timeout(30)

SETTINGS = FailoverSettings()


async def started(world: World, **fields: Any) -> tuple[Any, FakeEngine, FakeEngine, SequenceSubmit]:
    """A stream of one choice, the engine that has it, the other one, and its submit."""
    client = world.open(**fields)
    await until(lambda: any(not one.submits.empty() for one in world.engines.values()))
    (first,) = [one for one in world.engines.values() if not one.submits.empty()]
    (second,) = [one for one in world.engines.values() if one is not first]
    return client, first, second, first.submits.get_nowait()


@pytest.mark.parametrize("by_word", [False, True], ids=["stream breaks", "engine says so"])
async def test_a_stream_goes_on_on_another_engine_without_gap_or_repeat(by_word: bool) -> None:
    async with World("e0", "e1") as world:
        client, first, second, submit = await started(world, seed=5, max_tokens=30, timeout_ms=9000)
        first.tokens(submit, 0, *b"hel")
        await world.time.advance(2.0)
        if by_word:
            first.fail(submit, SequenceErrorCode.UNAVAILABLE, "rank 1 died")
        else:
            first.session.lose("rank 0 died")
        again = (await second.submits.get()).request
        assert again.resume_token_ids == ids("hel")
        assert again.prompt_token_ids == submit.request.prompt_token_ids
        assert again.noise_key == submit.request.noise_key
        assert (again.stop, again.sampling) == (submit.request.stop, submit.request.sampling)
        assert again.timeout_s == pytest.approx(7.0)
        second.text(SequenceSubmit(stream_key=1, request=again), "lo")
        await client.done()
        assert client.text() == "hello"
        assert client.token_ids() == ids("hello")
        assert [one.first_token_index for one in client.deltas] == [0, 3, 4]
        (end,) = client.ends
        assert (end.finish, end.usage.prompt_tokens, end.usage.completion_tokens) == (LENGTH, 2, 5)
        assert world.service.running_requests == 0


async def test_only_the_streams_of_the_lost_engine_move() -> None:
    metrics = CountingMetrics()
    async with World("e0", "e1", metrics=metrics) as world:
        clients = [world.open(text=one) for one in ("a", "b")]
        submits = {name: await engine.submits.get() for name, engine in world.engines.items()}
        world.engine.tokens(submits["e0"], 0, *b"before")
        world.engine.session.lose("rank 0 died")
        moved = await world.engines["e1"].submits.get()
        assert world.engines["e1"].submits.empty()
        world.engines["e1"].text(moved, " after")
        world.engines["e1"].text(submits["e1"], "fine")
        assert sorted([(await one.done()).text() for one in clients]) == ["before after", "fine"]
    assert metrics.of("sequences_moved") == [{"count": 1}]
    assert metrics.of("engine_lost") == [{"replica_id": "e0", "failed_sequences": 1}]
    assert [one["outcome"] for one in metrics.of("request_finished")] == ["completed"] * 2


async def test_a_character_and_a_stop_string_may_straddle_the_break() -> None:
    async with World("e0", "e1") as world:
        client, first, second, submit = await started(world, stop=("END",))
        first.tokens(submit, 0, *"x\u00e9E".encode()[:2])
        first.session.lose("gone")
        moved = await second.submits.get()
        second.tokens(moved, 2, *"\u00e9EN".encode()[1:])
        await until(lambda: client.text() == "x\u00e9")  # EN is held back
        second.session.lose("gone as well")
        await world.time.advance(1.0)
        last = await first.submits.get()
        assert last.request.resume_token_ids == ids("x\u00e9EN")
        first.tokens(last, 5, *b"D")
        finish = Finish(reason=FinishReason.STOP, stop_string_index=0)
        first.session.emit(SequenceEnd(stream_key=last.stream_key, finish=finish))
        await client.done()
        assert client.text() == "x\u00e9"
        assert client.ends[0].stop_string == "END"
        assert client.token_ids() == ids("x\u00e9END")


async def test_log_probabilities_go_on_with_the_tokens() -> None:
    def with_logprobs(submit: SequenceSubmit, at: int, data: bytes) -> SequenceDelta:
        one = [TokenLogprobs(logprob=-1.0 * token, top=()) for token in data]
        plain = delta(submit, at, *data)
        return SequenceDelta(
            stream_key=plain.stream_key, first_token_index=at, token_ids=plain.token_ids, logprobs=tuple(one)
        )

    async with World("e0", "e1") as world:
        client, first, second, submit = await started(world, top_logprobs=0)
        first.session.emit(with_logprobs(submit, 0, b"ab"))
        first.session.lose("gone")
        moved = await second.submits.get()
        second.session.emit(with_logprobs(moved, 2, b"c"), SequenceEnd(stream_key=moved.stream_key, finish=STOP))
        await client.done()
        assert [one.logprob for event in client.deltas for one in event.logprobs] == [-97.0, -98.0, -99.0]


async def test_resumed_tokens_of_the_client_come_first() -> None:
    async with World("e0", "e1") as world:
        client, first, second, submit = await started(world, resume_token_ids=ids("ab"), max_tokens=9)
        first.tokens(submit, 2, *b"cd")
        first.session.lose("gone")
        moved = await second.submits.get()
        assert moved.request.resume_token_ids == ids("abcd")
        second.text(moved, "e")
        await client.done()
        assert client.text() == "cde"
        assert client.ends[0].usage.completion_tokens == 3


async def test_unfinished_choices_move_together_and_finished_ones_stay() -> None:
    async with World("e0", "e1") as world:
        client = world.open(n=3)
        await until(lambda: any(one.submits.qsize() == 3 for one in world.engines.values()))
        first, second = sorted(world.engines.values(), key=lambda one: -one.submits.qsize())
        submits = [first.submits.get_nowait() for _ in range(3)]
        first.tokens(submits[0], 0, *b"a")
        first.text(submits[1], "done")
        first.tokens(submits[2], 0, *b"ccc")
        first.session.lose("gone")
        moved = [await second.submits.get() for _ in range(2)]
        assert [one.request.choice_index for one in moved] == [0, 2]
        assert [one.request.resume_token_ids for one in moved] == [ids("a"), ids("ccc")]
        assert [one.request.noise_key for one in moved] == [submits[at].request.noise_key for at in (0, 2)]
        second.text(moved[1], "C")
        second.text(moved[0], "A")
        await client.done()
        assert [client.text(index) for index in range(3)] == ["aA", "done", "cccC"]
        assert sorted(one.choice_index for one in client.ends) == [0, 1, 2]


async def test_the_rejection_rule_moves_with_its_rule() -> None:
    async with World("e0", "e1") as world:
        wish = SpeculationChoice(rule=VerificationRule.REJECTION)
        client, first, second, submit = await started(world, speculation=wish)
        first.tokens(submit, 0, *b"a")
        first.session.lose("gone")
        moved = await second.submits.get()
        assert moved.request.speculation.rule is VerificationRule.REJECTION
        second.text(moved, "b")
        assert (await client.done()).text() == "ab"


@pytest.mark.parametrize(
    ("fields", "tokens", "finish"),
    [
        ({"max_tokens": 2}, b"ab", LENGTH),
        ({}, (*b"ab", EOS), Finish(reason=FinishReason.STOP, stop_token_id=EOS)),
        ({"stop_token_ids": (98,)}, b"ab", Finish(reason=FinishReason.STOP, stop_token_id=98)),
        ({"stop": ("zz", "b")}, b"ab", Finish(reason=FinishReason.STOP, stop_string_index=1)),
    ],
    ids=["length", "eos", "stop id", "stop string"],
)
async def test_a_choice_that_lacks_only_the_word_end_needs_no_engine(
    fields: dict[str, Any], tokens: tuple[int, ...], finish: Finish
) -> None:
    async with World("e0", "e1") as world:
        client, first, second, submit = await started(world, **fields)
        first.tokens(submit, 0, *tokens)
        first.session.lose("gone")
        await client.done()
        assert client.ends[0].finish == finish
        assert client.text() == ("a" if "stop" in fields else "ab")
        assert client.ends[0].usage.completion_tokens == len(tokens)
        assert second.submits.empty()


async def test_without_another_engine_the_cause_is_told_when_the_grace_is_over() -> None:
    async with World() as world:
        client = world.open()
        world.engine.tokens(await world.engine.submits.get(), 0, *b"before")
        world.engine.unreachable = EngineUnavailable("connection refused")
        world.engine.session.lose("rank 0 died")
        await settle()
        assert world.service.running_requests == 1
        await world.time.advance(SETTINGS.grace_s)
        with pytest.raises(EngineUnavailable, match=r"rank 0 died; no other engine took over within 1\.5 s"):
            await client.done()
        assert client.text() == "before"
        assert world.service.running_requests == 0


async def test_an_engine_that_is_being_rebuilt_is_waited_for() -> None:
    async with World() as world:
        client = world.open()
        world.engine.tokens(await world.engine.submits.get(), 0, *b"be")
        world.engine.unreachable = EngineUnavailable("connection refused")
        world.pending = ["e0: engine is starting (epoch 2)"]
        world.engine.session.lose("rank 0 died")
        await world.time.advance(40.0)
        assert not client.ends
        world.engine.unreachable = None
        await world.time.advance(6.0)
        moved = world.engine.submits.get_nowait()
        assert moved.request.resume_token_ids == ids("be")
        world.engine.text(moved, "fore")
        assert (await client.done()).text() == "before"


async def test_a_rebuild_that_takes_too_long_is_given_up() -> None:
    async with World() as world:
        client = world.open()
        await world.engine.submits.get()
        world.engine.unreachable = EngineUnavailable("connection refused")
        world.pending = ["e0: engine is starting (epoch 2)"]
        world.engine.session.lose("rank 0 died")
        await settle()
        await world.time.advance(SETTINGS.rebuild_wait_s - 0.1)
        assert world.service.running_requests == 1
        await world.time.advance(0.2)
        with pytest.raises(EngineUnavailable, match="rank 0 died; no other engine took over within 60 s"):
            await client.done()


async def test_an_engine_that_joins_takes_over() -> None:
    async with World() as world:
        client = world.open()
        world.engine.tokens(await world.engine.submits.get(), 0, *b"a")
        world.engine.unreachable = EngineUnavailable("connection refused")
        world.engine.session.lose("node died")
        world.engines["e1"] = FakeEngine("e1")
        world.directory.listed = [type(world.directory.listed[0])(replica_id="e1", address="e1:1")]
        await world.pool.refresh()
        moved = await world.engines["e1"].submits.get()
        world.engines["e1"].text(moved, "b")
        assert (await client.done()).text() == "ab"


async def test_the_time_limit_counts_while_no_engine_runs_the_request() -> None:
    async with World() as world:
        client = world.open(timeout_ms=9500)
        await world.engine.submits.get()
        world.engine.unreachable = EngineUnavailable("connection refused")
        world.pending = ["e0: engine is starting"]
        world.engine.session.lose("rank 0 died")
        await world.time.advance(9.4)
        assert world.service.running_requests == 1
        await world.time.advance(0.2)  # between two looks at the directory
        assert world.service.running_requests == 0
        with pytest.raises(DeadlineExceeded, match="timeout_ms: 9500 passed"):
            await client.done()


async def test_abort_while_no_engine_runs_the_request() -> None:
    async with World() as world:
        client = world.open(request_id="r1")
        world.engine.tokens(await world.engine.submits.get(), 0, *b"a")
        world.engine.unreachable = EngineUnavailable("connection refused")
        world.engine.session.lose("rank 0 died")
        await settle()
        assert await world.service.abort("r1", Caller())
        await client.done()
        assert client.ends[0].finish.reason is FinishReason.ABORTED
        assert client.text() == "a"


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    async with World() as world:
        client = world.open()
        await world.engine.submits.get()
        world.engine.unreachable = EngineUnavailable("connection refused")
        world.engine.session.lose("rank 0 died")
        await settle()
        client.leave()
        await until(lambda: not world.service.running_requests)
        world.engine.unreachable = None
        await world.time.advance(5.0)
        assert world.engine.submits.empty()


async def test_a_moved_request_is_aborted_where_it_runs_now() -> None:
    async with World("e0", "e1") as world:
        client, first, second, _ = await started(world, request_id="r1")
        first.session.lose("gone")
        moved = await second.submits.get()
        assert await world.service.abort("r1", Caller())
        assert second.session.aborted == [moved.stream_key]
        second.session.emit(SequenceEnd(stream_key=moved.stream_key, finish=Finish(reason=FinishReason.ABORTED)))
        await client.done()


async def test_a_full_engine_is_asked_again() -> None:
    async with World("e0", "e1") as world:
        client, first, second, _ = await started(world)
        first.unreachable = EngineUnavailable("no")
        first.session.lose("gone")
        second.fail(await second.submits.get(), SequenceErrorCode.OVERLOADED, "the queue is full")
        await settle()
        assert second.submits.empty()
        await world.time.advance(1.0)
        second.text(second.submits.get_nowait(), "fine")
        assert (await client.done()).text() == "fine"


async def test_a_request_that_ends_its_engines_stops_moving() -> None:
    limit = ServiceSettings(failover=FailoverSettings(max_moves=2))
    async with World("e0", "e1", settings=limit) as world:
        client, first, second, _ = await started(world)
        first.session.lose("crash 1")
        await second.submits.get()
        await world.time.advance(1.0)
        second.session.lose("crash 2")
        await first.submits.get()
        await world.time.advance(1.0)
        first.session.lose("crash 3")
        with pytest.raises(EngineUnavailable, match="crash 3"):
            await client.done()
        assert second.submits.empty()


async def test_a_field_that_the_next_engine_refuses_ends_the_request() -> None:
    async with World("e0", "e1") as world:
        client, first, second, _ = await started(world)
        first.session.lose("gone")
        second.fail(await second.submits.get(), SequenceErrorCode.INVALID, "max_tokens: too long")
        with pytest.raises(InvalidRequest, match="too long"):
            await client.done()


async def test_a_slow_reader_is_still_cut_and_a_lost_engine_does_not_hide_it() -> None:
    settings = ServiceSettings(max_buffered_events=2)
    async with World("e0", "e1", settings=settings) as world:
        stream = world.service.stream(request(), Caller())
        await anext(stream)
        engine = next(one for one in world.engines.values() if not one.submits.empty())
        submit = engine.submits.get_nowait()
        engine.session.emit(*(delta(submit, at, 97) for at in range(3)))
        await settle()
        engine.session.lose("gone")
        await settle()
        with pytest.raises(RequestAborted, match="reads too slowly"):
            await asyncio.wait_for(drain(stream), 10)


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_times_of_a_moved_request_span_both_engines() -> None:
    async with World("e0", "e1") as world:
        client, first, second, submit = await started(world)
        await world.time.advance(0.5)
        first.tokens(submit, 0, *b"a")
        await until(lambda: client.deltas)
        await world.time.advance(1.5)
        first.session.lose("gone")
        moved = await second.submits.get()
        await world.time.advance(3.0)
        second.tokens(moved, 1, *b"b")
        timings = Timings(queue_s=0.1, prefill_s=0.2, first_token_s=0.4, total_s=3.0)
        second.session.emit(SequenceEnd(stream_key=moved.stream_key, finish=STOP, timings=timings))
        await client.done()
        assert client.ends[0].timings == Timings(queue_s=0.1, prefill_s=0.2, first_token_s=0.5, total_s=5.0)


async def test_a_finished_move_leaves_no_alarm() -> None:
    async with World("e0", "e1") as world:
        before = len(world.time.pending)
        client, first, second, _ = await started(world)
        first.unreachable = EngineUnavailable("no")
        first.session.lose("gone")
        second.text(await second.submits.get(), "x")
        await client.done()
        await settle()
        assert len(world.time.pending) <= before + 1  # the lost link's next attempt


@pytest.mark.parametrize("wrong", [{"max_moves": -1}, {"grace_s": 0.0}, {"rebuild_wait_s": float("nan")}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FailoverSettings(**wrong)

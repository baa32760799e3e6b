"""The router end to end over fake engines: streams, isolation, limits, aborts, losses."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router.byte_codec import ByteCodec, ids
from tests.unit.router.fakes import (
    ABORTED,
    LENGTH,
    LIMITS,
    STOP,
    Client,
    World,
    delta,
    overloaded,
    request,
    settle,
    until,
)

from outrider import __version__
from outrider.core.dispatch import EngineStatus, SequenceEnd, SequenceErrorCode
from outrider.core.errors import (
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestAborted,
)
from outrider.core.generation import Caller, ChatMessage, GenerationAccepted
from outrider.core.policy import GateSettings
from outrider.core.ports import GenerationService
from outrider.core.sequence import Finish, FinishReason
from outrider.decoding.keys import derive_key
from outrider.router.codec import OFF_LOOP_CHARS
from outrider.router.limits import AdmissionLimits
from outrider.router.run import RequestRun
from outrider.router.service import RouterService, ServiceSettings

pytestmark = pytest.mark.timeout(30)


LONG: dict[str, Any] = {"text": "x" * OFF_LOOP_CHARS, "max_tokens": 5}
"""Tokenized in a thread."""


class GatedCodec(ByteCodec):
    """Tokenizes text only after the test opens the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def encode(self, text: str) -> list[int]:
        assert self.gate.wait(10)
        return list(text.encode()[:500])

    def encode_chat(self, messages: Sequence[ChatMessage], *, continue_final_message: bool) -> list[int]:
        assert self.gate.wait(10)
        return [1]


def as_port(service: RouterService) -> GenerationService:
    """The type checker's proof that the router is what every door expects."""
    return service


async def test_stream_from_request_to_end() -> None:
    async with World() as world:
        client = world.open(request_id="r1", seed=5, max_tokens=9, priority=3, traffic_class="batch", timeout_ms=1500)
        submit = await world.engine.submits.get()
        sent = submit.request
        assert (sent.request_id, sent.prompt_token_ids, sent.noise_key) == ("r1", ids("hi"), derive_key(5, 0))
        assert (sent.stop.max_tokens, sent.priority, sent.traffic_class, sent.timeout_s) == (9, 3, "batch", 1.5)
        world.engine.text(submit, "héllo", per_step=2)
        await client.done()
        assert client.events[0] == GenerationAccepted(request_id="r1", model="toy", seed=5, prompt_tokens=2)
        assert [one.text for one in client.deltas] == ["h", "él", "lo"]
        assert [one.first_token_index for one in client.deltas] == [0, 2, 4]
        assert client.token_ids() == ids("héllo")
        assert {one.seed for one in client.deltas} == {5}
        (end,) = client.ends
        assert (end.finish, end.usage.prompt_tokens, end.usage.completion_tokens) == (LENGTH, 2, 6)
        assert world.service.running_requests == 0
        assert world.engine.session.aborted == []


async def test_server_makes_id_and_seed_and_echoes_them() -> None:
    async with World() as world:
        client = world.open()
        submit = await world.engine.submits.get()
        world.engine.text(submit, "x")
        await client.done()
        accepted = client.events[0]
        assert isinstance(accepted, GenerationAccepted)
        assert accepted.request_id == submit.request.request_id
        assert len(accepted.request_id) == 32
        assert submit.request.noise_key == derive_key(accepted.seed, 0)
        assert client.deltas[0].seed == accepted.seed


async def test_trace_context_is_passed_on() -> None:
    async with World() as world:
        client = Client(world.service.stream(request(), Caller(traceparent="00-a-b-01")))
        submit = await world.engine.submits.get()
        assert submit.request.traceparent == "00-a-b-01"
        world.engine.text(submit, "x")
        await client.done()


async def test_interleaved_deltas_reach_their_own_clients() -> None:
    async with World() as world:
        texts = ["first", "second", "third"]
        clients = [world.open(text=one) for one in texts]
        submits = [await world.engine.submits.get() for _ in texts]
        by_prompt = {bytes(one.request.prompt_token_ids).decode(): one for one in submits}
        for at in range(5):  # every step is one message for all
            world.engine.session.emit(*(delta(by_prompt[one], at, ord(one[at])) for one in texts))
        world.engine.session.emit(
            *(SequenceEnd(stream_key=one.stream_key, finish=STOP) for one in submits),
        )
        assert [(await one.done()).text() for one in clients] == ["first", "secon", "third"]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abEND")])
async def test_stop_string_straddles_deltas(include: bool, text: str) -> None:
    async with World() as world:
        client = world.open(stop=("END",), include_stop_str=include)
        submit = await world.engine.submits.get()
        finish = Finish(reason=FinishReason.STOP, stop_string_index=0)
        world.engine.text(submit, "abEND", per_step=2, finish=finish)
        await client.done()
        assert client.text() == text
        assert client.token_ids() == ids("abEND")
        assert client.ends[0].stop_string == "END"
        assert client.ends[0].usage.completion_tokens == 5


async def test_held_back_text_is_shown_when_the_end_comes_without_the_stop_string() -> None:
    async with World() as world:
        client = world.open(stop=("END",))
        world.engine.text(await world.engine.submits.get(), "abEN")
        await client.done()
        assert client.text() == "abEN"
        assert client.deltas[-1].token_ids == ()


async def test_resumed_request_sends_nothing_again() -> None:
    async with World() as world:
        resumed = ids("so far, E")
        client = world.open(resume_token_ids=resumed, stop=("END",), seed=3)
        submit = await world.engine.submits.get()
        assert submit.request.resume_token_ids == resumed
        finish = Finish(reason=FinishReason.STOP, stop_string_index=0)
        world.engine.text(submit, "ND", finish=finish)
        await client.done()
        assert client.text() == ""
        assert [one.first_token_index for one in client.deltas] == [9, 10]
        assert client.ends[0].usage.completion_tokens == 2


async def test_long_resumption_continues_alike() -> None:
    async with World() as world:
        client = world.open(resume_token_ids=ids("é" * 300)[:-1])
        submit = await world.engine.submits.get()
        world.engine.tokens(submit, 599, ids("é")[1])
        world.engine.session.emit(SequenceEnd(stream_key=submit.stream_key, finish=LENGTH))
        assert (await client.done()).text() == "é"


async def test_choices_are_merged_in_order_of_arrival() -> None:
    async with World() as world:
        client = world.open(n=2, seed=1)
        first, second = await world.engine.submits.get(), await world.engine.submits.get()
        assert [one.request.choice_index for one in (first, second)] == [0, 1]
        assert first.request.noise_key != second.request.noise_key
        world.engine.tokens(second, 0, *b"x")
        world.engine.tokens(first, 0, *b"a")
        world.engine.session.emit(SequenceEnd(stream_key=first.stream_key, finish=STOP))
        world.engine.tokens(second, 1, *b"y")
        world.engine.session.emit(SequenceEnd(stream_key=second.stream_key, finish=LENGTH))
        await client.done()
        assert [(one.choice_index, one.text) for one in client.deltas] == [(1, "x"), (0, "a"), (1, "y")]
        assert [(one.choice_index, one.finish) for one in client.ends] == [(0, STOP), (1, LENGTH)]


async def test_error_in_one_choice_ends_the_request_and_aborts_the_others() -> None:
    async with World() as world:
        client = world.open(n=3)
        submits = [await world.engine.submits.get() for _ in range(3)]
        world.engine.fail(submits[1], SequenceErrorCode.OVERLOADED, "the queue is full")
        with pytest.raises(Overloaded, match="the queue is full"):
            await client.done()
        assert world.engine.session.aborted == [submits[0].stream_key, submits[2].stream_key]
        assert world.service.running_requests == 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (SequenceErrorCode.INVALID, InvalidRequest),
        (SequenceErrorCode.OVERLOADED, Overloaded),
        (SequenceErrorCode.DEADLINE, DeadlineExceeded),
    ],
)
async def test_failed_sequence_raises_the_domain_error(code: SequenceErrorCode, error: type[Exception]) -> None:
    async with World() as world:
        client = world.open()
        world.engine.fail(await world.engine.submits.get(), code, "top_k: no")
        with pytest.raises(error, match="top_k: no"):
            await client.done()


async def test_bad_request_disturbs_no_other_stream() -> None:
    async with World() as world:
        good = world.open()
        submit = await world.engine.submits.get()
        world.engine.tokens(submit, 0, *b"a")
        for bad in ({"top_p": 2.0}, {"text": ""}, {"resume_token_ids": (1,), "max_tokens": 1}):
            with pytest.raises(InvalidRequest):
                await world.open(**bad).done()
        with pytest.raises(ModelNotFound):
            await world.open(model="other").done()
        world.engine.tokens(submit, 1, *b"b")
        world.engine.session.emit(SequenceEnd(stream_key=submit.stream_key, finish=STOP))
        assert (await good.done()).text() == "ab"
        assert world.engine.submits.empty()


async def test_what_is_refused_is_logged_without_more_than_a_request_may_say(caplog: pytest.LogCaptureFixture) -> None:
    async with World() as world:
        with caplog.at_level("INFO", "outrider.router.service"), pytest.raises(InvalidRequest, match="request_id"):
            await world.open(request_id="x" * 10_000, text="secret").done()
    (refused,) = [vars(one) for one in caplog.records if one.getMessage() == "request refused"]
    assert (refused["request_id"], refused["outcome"]) == ("x" * LIMITS.max_request_id_chars, "InvalidRequest")


async def test_output_with_a_hole_ends_only_its_own_request() -> None:
    async with World() as world:
        broken, whole = world.open(text="b"), world.open(text="w")
        first, second = await world.engine.submits.get(), await world.engine.submits.get()
        world.engine.tokens(first, 1, *b"x")
        with pytest.raises(EngineUnavailable, match="output token 1, 0 was next"):
            await broken.done()
        assert world.engine.session.aborted == [first.stream_key]
        world.engine.text(second, "fine")
        assert (await whole.done()).text() == "fine"


async def test_abort_ends_the_stream_with_what_the_engine_says() -> None:
    async with World() as world:
        client = world.open(request_id="r1", key_id="k", stop=("END",))
        submit = await world.engine.submits.get()
        world.engine.tokens(submit, 0, *b"aE")
        await until(lambda: client.deltas)
        assert await world.service.abort("r1", Caller(key_id="k"))
        assert world.engine.session.aborted == [submit.stream_key]
        world.engine.session.emit(SequenceEnd(stream_key=submit.stream_key, finish=ABORTED))
        await client.done()
        assert client.ends[0].finish == ABORTED
        assert client.text() == "aE"
        assert not await world.service.abort("r1", Caller(key_id="k"))


async def test_abort_is_scoped_by_key() -> None:
    async with World() as world:
        client = world.open(request_id="r1", key_id="owner")
        await world.engine.submits.get()
        assert not await world.service.abort("r1", Caller(key_id="stranger"))
        assert world.engine.session.aborted == []
        client.leave()


async def test_abort_of_an_unknown_request_asks_the_other_routers() -> None:
    asked: list[tuple[str, str]] = []

    async def others(request_id: str, caller: Caller) -> bool:
        asked.append((request_id, caller.key_id))
        return request_id == "elsewhere"

    async with World(broadcast_abort=others) as world:
        assert await world.service.abort("elsewhere", Caller(key_id="k"))
        assert not await world.service.abort("nowhere", Caller(key_id="k"))
        assert asked == [("elsewhere", "k"), ("nowhere", "k")]
        assert not world.service.abort_local("nowhere", Caller(key_id="k"))


async def test_abort_during_tokenization_never_reaches_an_engine() -> None:
    codec = GatedCodec()
    async with World(codec=codec) as world:
        client = world.open(request_id="r1", **LONG)
        await until(lambda: world.service.running_requests)
        assert await world.service.abort("r1", Caller())
        codec.gate.set()
        with pytest.raises(RequestAborted, match="'r1' was aborted before it ran"):
            await client.done()
        assert world.engine.submits.empty()


@pytest.mark.parametrize(
    "long", [LONG, {"text": None, "messages": (ChatMessage(role="user", content=""),) * 1000}], ids=["text", "turns"]
)
async def test_long_text_is_tokenized_beside_other_streams(long: dict[str, Any]) -> None:
    codec = GatedCodec()
    async with World(codec=codec) as world:
        slow = world.open(**long)
        await until(lambda: world.service.running_requests)
        quick = world.open(token_ids=(1,), text=None)
        world.engine.text(await world.engine.submits.get(), "quick")
        assert (await quick.done()).text() == "quick"
        codec.gate.set()
        world.engine.text(await world.engine.submits.get(), "slow")
        assert (await slow.done()).text() == "slow"


async def test_closing_the_iterator_aborts_on_the_engine() -> None:
    async with World() as world:
        events = world.service.stream(request(), Caller())
        async with aclosing(events):
            assert isinstance(await anext(events), GenerationAccepted)
            submit = await world.engine.submits.get()
        assert world.engine.session.aborted == [submit.stream_key]
        assert world.service.running_requests == 0
        world.engine.text(submit, "too late")  # dropped
        await settle()


async def test_cancelled_reader_aborts_on_the_engine() -> None:
    async with World() as world:
        client = world.open(n=2)
        submits = [await world.engine.submits.get() for _ in range(2)]
        client.leave()
        await until(lambda: not world.service.running_requests)
        assert world.engine.session.aborted == [one.stream_key for one in submits]


async def test_abort_waits_while_the_engines_queue_is_full() -> None:
    async with World() as world:
        client = world.open()
        submit = await world.engine.submits.get()
        world.engine.refusal = overloaded()
        client.leave()
        await until(lambda: not world.service.running_requests)
        world.engine.refusal = None
        await world.time.advance(1.0)
        assert world.engine.session.aborted == [submit.stream_key]


async def test_request_after_a_loss_goes_to_the_next_engine() -> None:
    async with World("e0", "e1") as world:
        world.engine.session.lose("gone")
        await settle()
        client = world.open()
        world.engines["e1"].text(await world.engines["e1"].submits.get(), "fine")
        assert (await client.done()).text() == "fine"


async def test_engine_that_refuses_is_passed_over() -> None:
    async with World("e0", "e1") as world:
        world.engine.refusal = overloaded()
        clients = [world.open() for _ in range(3)]
        for _ in clients:
            world.engines["e1"].text(await world.engines["e1"].submits.get(), "fine")
        assert [(await one.done()).text() for one in clients] == ["fine"] * 3


async def test_request_that_every_engine_refuses_gets_the_last_refusal() -> None:
    async with World("e0", "e1") as world:
        for one in world.engines.values():
            one.refusal = overloaded()
        with pytest.raises(Overloaded, match="the queue is full"):
            await world.open().done()
        for one in world.engines.values():
            one.refusal = EngineUnavailable("broken pipe")
        with pytest.raises(EngineUnavailable, match="broken pipe"):
            await world.open().done()
        assert world.service.running_requests == 0


async def test_no_engine_names_the_cause() -> None:
    world = World()
    world.engine.unreachable = EngineUnavailable("connection refused")
    async with world:
        with pytest.raises(EngineUnavailable, match="no engine is ready: e0: connection refused"):
            await world.open().done()


async def test_overload_is_refused_with_a_time_to_wait() -> None:
    admission = AdmissionLimits(max_requests=1, max_retry_after_s=7.0)
    async with World(limits=replace(LIMITS, admission=admission)) as world:
        client = world.open()
        submit = await world.engine.submits.get()
        with pytest.raises(Overloaded, match="1 requests are in flight; the limit is 1") as caught:
            await world.open().done()
        assert caught.value.retry_after_s == 7.0
        await world.time.advance(1.0)
        world.engine.text(submit, "x")
        await client.done()
        again = world.open()
        world.engine.text(await world.engine.submits.get(), "y")
        assert (await again.done()).text() == "y"


async def test_tokens_in_flight_are_charged_for_every_choice_and_given_back() -> None:
    admission = AdmissionLimits(max_tokens=50)
    async with World(limits=replace(LIMITS, admission=admission)) as world:
        client = world.open(n=2, max_tokens=10)  # 2 * (2 + 10)
        submits = [await world.engine.submits.get() for _ in range(2)]
        with pytest.raises(Overloaded, match="24 tokens are in flight and 32 more exceed the limit 50"):
            await world.open(max_tokens=30).done()
        for one in submits:
            world.engine.text(one, "x")
        await client.done()
        other = world.open(max_tokens=30)
        world.engine.text(await world.engine.submits.get(), "y")
        await other.done()


async def test_one_key_leaves_room_for_others() -> None:
    admission = AdmissionLimits(max_requests=10, max_requests_per_key=2)
    async with World(limits=replace(LIMITS, admission=admission)) as world:
        mine = [world.open(key_id="greedy") for _ in range(2)]
        for _ in mine:
            await world.engine.submits.get()
        with pytest.raises(Overloaded, match="of this key"):
            await world.open(key_id="greedy").done()
        other = world.open(key_id="modest")
        world.engine.text(await world.engine.submits.get(), "x")
        await other.done()
        for one in mine:
            one.leave()


async def test_slow_reader_is_cut_and_nobody_else() -> None:
    async with World(settings=ServiceSettings(max_buffered_events=4)) as world:
        slow = world.service.stream(request(text="s"), Caller())
        assert isinstance(await anext(slow), GenerationAccepted)
        slow_submit = await world.engine.submits.get()
        quick = world.open(text="q")
        quick_submit = await world.engine.submits.get()
        for at in range(10):
            world.engine.session.emit(delta(slow_submit, at, 120), delta(quick_submit, at, 113))
            await until(lambda at=at: len(quick.deltas) == at + 1)  # type: ignore[misc]
        world.engine.session.emit(SequenceEnd(stream_key=quick_submit.stream_key, finish=STOP))
        assert (await quick.done()).text() == "q" * 10
        assert world.engine.session.aborted == [slow_submit.stream_key]
        rest = Client(slow)
        with pytest.raises(RequestAborted, match="reads too slowly"):
            await rest.done()
        assert rest.text() == "xxxx"  # what was buffered is still delivered


async def test_running_request_id_is_refused_and_free_again_afterwards() -> None:
    async with World() as world:
        client = world.open(request_id="r1", key_id="k")
        submit = await world.engine.submits.get()
        with pytest.raises(DuplicateRequest, match="'r1' is already running"):
            await world.open(request_id="r1", key_id="k").done()
        other = world.open(request_id="r1", key_id="another key")
        world.engine.text(await world.engine.submits.get(), "other")
        assert (await other.done()).text() == "other"
        world.engine.text(submit, "first")
        assert (await client.done()).text() == "first"
        again = world.open(request_id="r1", key_id="k")
        world.engine.text(await world.engine.submits.get(), "again")
        assert (await again.done()).text() == "again"


async def test_backstop_ends_a_request_that_the_engine_forgot() -> None:
    async with World(settings=ServiceSettings(backstop_grace_s=2.0)) as world:
        client = world.open(timeout_ms=3000)
        submit = await world.engine.submits.get()
        await world.time.advance(4.9)
        assert world.service.running_requests == 1
        await world.time.advance(0.2)
        with pytest.raises(DeadlineExceeded, match="timeout_ms: 3000 passed"):
            await client.done()
        assert world.engine.session.aborted == [submit.stream_key]


@pytest.mark.parametrize(("spent_s", "left_s"), [(0.5, 1.5), (1.75, 0.25)])
async def test_time_spent_before_the_engine_is_taken_off_the_limit(spent_s: float, left_s: float) -> None:
    codec = GatedCodec()
    async with World(codec=codec) as world:
        client = world.open(timeout_ms=2000, **LONG)
        await until(lambda: world.service.running_requests)
        await world.time.advance(spent_s)
        codec.gate.set()
        assert (await world.engine.submits.get()).request.timeout_s == left_s
        client.leave()


async def test_request_whose_time_is_up_before_the_engine_is_not_sent() -> None:
    codec = GatedCodec()
    async with World(codec=codec) as world:
        client = world.open(timeout_ms=2000, **LONG)
        await until(lambda: world.service.running_requests)
        await world.time.advance(2.0)
        codec.gate.set()
        with pytest.raises(DeadlineExceeded, match="timeout_ms: 2000 passed before an engine was reached"):
            await client.done()
        assert world.engine.submits.empty()


async def test_default_time_limit_applies() -> None:
    async with World(limits=replace(LIMITS, default_timeout_ms=7000)) as world:
        client = world.open()
        assert (await world.engine.submits.get()).request.timeout_s == 7.0
        client.leave()


async def test_finished_request_leaves_no_alarm() -> None:
    async with World() as world:
        before = world.time.pending
        client = world.open()
        submit = await world.engine.submits.get()
        assert len(world.time.pending) == len(before) + 1
        world.engine.text(submit, "x")
        await client.done()
        assert world.time.pending == before


async def test_text_is_limited_by_what_the_engines_hold() -> None:
    world = World()
    world.engine.kv_capacity_tokens = 50
    async with world:
        with pytest.raises(InvalidRequest, match="exceed max_model_len 50"):
            await world.open(max_tokens=49).done()
        client = world.open()
        assert (await world.engine.submits.get()).request.stop.max_tokens == 48
        assert (await world.service.model_info("")).max_model_len == 50
        client.leave()


async def test_model_info() -> None:
    async with World() as world:
        info = await world.service.model_info("toy")
        assert info == await world.service.model_info("")
        assert (info.model, info.max_model_len, info.vocab_size, info.eos_token_ids) == ("toy", 1024, 259, (256,))
        assert (info.max_num_speculative_tokens, info.max_choices, info.max_top_logprobs) == (8, 16, 20)
        assert info.unsupported_fields == ("json_schema", "regex", "grammar", "adapter")
        assert info.server_version == __version__
        with pytest.raises(ModelNotFound):
            await world.service.model_info("other")


async def test_speculation_status_lists_every_engine() -> None:
    world = World("e1", "e0")
    world.engines["e1"].unreachable = EngineUnavailable("no route")
    async with world:
        ready, gone = await world.service.speculation_status()
        assert ready == EngineStatus(engine_id="e0", ready=True)
        assert (gone.engine_id, gone.ready, gone.problem) == ("e1", False, "no route")


async def test_settings_change_live() -> None:
    async with World() as world:
        gate = GateSettings(max_num_draft_tokens=3)
        admission = AdmissionLimits(max_requests=1)
        world.service.update_settings(gate, replace(LIMITS, max_choices=2, admission=admission))
        assert world.engine.session.gates[-1] == gate
        with pytest.raises(InvalidRequest, match=r"n: 3 is outside \[1, 2\]"):
            await world.open(n=3).done()
        client = world.open()
        await world.engine.submits.get()
        with pytest.raises(Overloaded, match="the limit is 1"):
            await world.open().done()
        client.leave()
        with pytest.raises(ConfigError, match="model: 'other' cannot replace 'toy'"):
            world.service.update_settings(gate, replace(LIMITS, model="other"))


async def test_drain_refuses_new_requests_and_waits_for_running_ones() -> None:
    async with World() as world:
        client = world.open()
        submit = await world.engine.submits.get()
        draining = asyncio.create_task(world.service.drain())
        await settle()
        assert not draining.done()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await world.open().done()
        world.engine.text(submit, "last words")
        assert (await client.done()).text() == "last words"
        async with asyncio.timeout(10):
            await draining


async def test_close_fails_what_still_runs() -> None:
    async with World() as world:
        client = world.open()
        await world.engine.submits.get()
        await world.service.close()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await client.done()
        await world.service.close()


class CountingMetrics:
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda **labels: self.calls.append((name, labels))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [labels for called, labels in self.calls if called == name]


async def test_every_request_is_counted_once_with_its_outcome() -> None:
    metrics = CountingMetrics()
    async with World(metrics=metrics) as world:
        for finish in ("completed", "failed", "left"):
            client = world.open(traffic_class="batch")
            submit = await world.engine.submits.get()
            await world.time.advance(0.25)
            if finish == "completed":
                world.engine.text(submit, "abc", per_step=2)
                await client.done()
            elif finish == "failed":
                world.engine.fail(submit, SequenceErrorCode.DEADLINE, "late")
                with pytest.raises(DeadlineExceeded):
                    await client.done()
            else:
                client.leave()
                await until(lambda: not world.service.running_requests)
        with pytest.raises(InvalidRequest):
            await world.open(top_k=-1).done()
        with pytest.raises(InvalidRequest):
            await world.open(token_ids=(9999,), text=None).done()
        world.engine.session.lose("gone")
        await settle()
    assert metrics.of("request_started") == [{"traffic_class": "batch", "prompt_tokens": 2}] * 3
    assert [one["outcome"] for one in metrics.of("request_finished")] == ["completed", "DeadlineExceeded", "abandoned"]
    assert metrics.of("request_refused") == [{"error": "InvalidRequest"}] * 2
    assert metrics.of("first_token") == [{"traffic_class": "batch", "after_s": 0.25}]
    assert [one["count"] for one in metrics.of("tokens_streamed")] == [2, 1]
    assert metrics.of("engine_connected") == [{"replica_id": "e0"}]
    assert metrics.of("engine_lost") == [{"replica_id": "e0", "failed_sequences": 0}]


async def test_a_fault_of_ours_is_counted_as_one_and_says_whose_request_it_met(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(run: RequestRun, event: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RequestRun, "client_events", broken)
    metrics = CountingMetrics()
    with caplog.at_level("INFO", "outrider.router.service"):
        async with World(metrics=metrics) as world:
            client = world.open(request_id="mine")
            world.engine.text(await world.engine.submits.get(), "a")
            with pytest.raises(ZeroDivisionError) as caught:
                await client.done()
    assert caught.value.__notes__ == ["request_id: mine"]
    assert [one["outcome"] for one in metrics.of("request_finished")] == ["InternalError"]
    (ended,) = [vars(one) for one in caplog.records if one.getMessage() == "request ended"]
    assert (ended["request_id"], ended["outcome"]) == ("mine", "InternalError")


def test_service_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_buffered_events"):
        ServiceSettings(max_buffered_events=0)
    with pytest.raises(ConfigError, match="backstop_grace_s"):
        ServiceSettings(backstop_grace_s=-1.0)

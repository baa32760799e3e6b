"""The HTTP door with OpenAI's own client: a real HTTP server, a real router, engines that the test moves."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import AsyncOpenAI
from tests.support.http_door import http_server
from tests.unit.router.byte_codec import ByteCodec
from tests.unit.router.fakes import LENGTH, LIMITS, World, until

from outrider.core.dispatch import (
    SequenceDelta,
    SequenceEnd,
    SequenceErrorCode,
    SequenceSubmit,
    SpeculationOutcome,
)
from outrider.core.errors import Overloaded
from outrider.core.sequence import Finish, FinishReason
from outrider.core.speculation import SpeculationMode, SpeculationReason, SpeculationStats
from outrider.core.verdict import TokenLogprobs
from outrider.router.api_keys import ApiKey, KeyRing, digest_of
from outrider.router.limits import AdmissionLimits, KeyLimits, RouterLimits
from outrider.router.openai.door import DoorOptions, OpenAIDoor
from outrider.router.openai.event_stream import EventStream
from outrider.router.openai.failures import as_response, failure_of

pytestmark = pytest.mark.timeout(60)

KEY, OTHER_KEY = "or-mine", "or-other"
STATS = SpeculationStats(
    rounds=4,
    speculative_rounds=3,
    verified=8,
    accepted=4,
    committed=8,
    accepted_per_position=[2, 2, 0],
    verified_per_position=[3, 3, 2],
)


class Http:
    """A router behind a door; `client` is OpenAI's, `raw` speaks plain HTTP."""

    def __init__(self, world: World, url: str, keys: KeyRing) -> None:
        self.world = world
        self.keys = keys
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20)
        self.other = AsyncOpenAI(base_url=f"{url}/v1", api_key=OTHER_KEY, max_retries=0, timeout=20)
        self.raw = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=20)

    async def close(self) -> None:
        for one in (self.client, self.other):
            await one.close()
        await self.raw.aclose()

    async def submitted(self) -> SequenceSubmit:
        async with asyncio.timeout(10):
            return await self.world.engine.submits.get()

    async def answer(self, text: str, *, finish: Finish = LENGTH, per_step: int = 1) -> SequenceSubmit:
        """Let the engine say this to the next sequence."""
        submit = await self.submitted()
        self.say(submit, text, per_step=per_step)
        self.end(submit, finish)
        return submit

    def say(self, submit: SequenceSubmit, text: str, *, at: int = 0, per_step: int = 1) -> None:
        data = text.encode()
        for index in range(0, len(data), per_step):
            ids = tuple(data[index : index + per_step])
            logprobs = tuple(TokenLogprobs(logprob=-0.5, top=((one, -0.5), (120, -1.5))) for one in ids)
            wanted = submit.request.top_logprobs is not None
            self.world.engine.session.emit(
                SequenceDelta(
                    stream_key=submit.stream_key,
                    first_token_index=at + index,
                    token_ids=ids,
                    logprobs=logprobs if wanted else (),
                )
            )

    def end(self, submit: SequenceSubmit, finish: Finish = LENGTH) -> None:
        outcome = SpeculationOutcome(mode=SpeculationMode.SEQUENTIAL, reason=SpeculationReason.ON, stats=STATS)
        self.world.engine.session.emit(
            SequenceEnd(stream_key=submit.stream_key, finish=finish, cached_prompt_tokens=1, speculation=outcome)
        )


@asynccontextmanager
async def served(
    *, options: DoorOptions | None = None, limits: KeyLimits | None = None, router_limits: RouterLimits = LIMITS
) -> AsyncIterator[Http]:
    keys = KeyRing(
        [
            ApiKey(key_id="mine", digest=digest_of(KEY), limits=limits or KeyLimits()),
            ApiKey(key_id="other", digest=digest_of(OTHER_KEY)),
        ]
    )
    async with World(limits_of=keys.limits_of, limits=router_limits) as made:
        door = OpenAIDoor(
            made.service,
            tokens=ByteCodec(),
            authenticate=keys.authenticate,
            ready=lambda: any(one.ready for one in made.pool.statuses()),
            options=options,
        )
        async with http_server(door.app) as url:
            http_side = Http(made, url, keys)
            try:
                yield http_side
            finally:
                await http_side.close()


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with served() as made:
        yield made


CHAT: Any = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_chat(http: Http) -> None:
    asking = asyncio.ensure_future(
        http.client.chat.completions.create(
            **CHAT, max_completion_tokens=5, temperature=0.5, seed=7, user="someone", extra_body={"top_k": 3}
        )
    )
    submit = await http.answer("hello")
    answer = await asking
    assert bytes(one for one in submit.request.prompt_token_ids if one < 256) == b"u:hia:"
    assert (submit.request.stop.max_tokens, submit.request.sampling.temperature) == (5, 0.5)
    assert submit.request.sampling.top_k == 3
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "toy", "chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "length")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5 + answer.usage.prompt_tokens)
    assert answer.usage.prompt_tokens == len(submit.request.prompt_token_ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_a_chat_in_parts_as_benchmarks_send_it(http: Http) -> None:
    parts = [
        {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}, "annotations": []},
    ]
    messages = [{"role": "user", "content": parts}]
    body = {
        "model": "toy",
        "messages": messages,
        "max_completion_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    asking = asyncio.ensure_future(http.raw.post("/v1/chat/completions", json=body))
    submit = await http.answer("xy")
    assert bytes(one for one in submit.request.prompt_token_ids if one < 256) == b"u:aba:"
    assert submit.request.stop.eos_token_ids == ()
    events = [line.removeprefix("data: ") for line in (await asking).text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(one) for one in events[:-1]]
    assert [one["choices"][0]["delta"].get("content") for one in chunks[:-1]] == ["", "x", "y", None]
    assert [one["usage"] for one in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2


async def test_a_chat_streams_every_step_as_it_comes(http: Http) -> None:
    stream = asyncio.ensure_future(
        http.client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    )
    submit = await http.submitted()
    chunks = aiter(await stream)
    assert (await anext(chunks)).choices[0].delta.role == "assistant"
    for at, text in enumerate(["h", "é", "y"]):
        http.say(submit, text, at=at + (at > 1), per_step=2)
        assert (await anext(chunks)).choices[0].delta.content == text
    http.end(submit, Finish(reason=FinishReason.STOP))
    assert (await anext(chunks)).choices[0].finish_reason == "stop"
    last = await anext(chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4
    assert last.object == "chat.completion.chunk"
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)


async def test_choices_of_one_stream(http: Http) -> None:
    stream = asyncio.ensure_future(http.client.chat.completions.create(**CHAT, n=2, stream=True))
    first, second = await http.submitted(), await http.submitted()
    assert first.request.noise_key != second.request.noise_key
    http.say(second, "bb")
    http.say(first, "a")
    http.end(first)
    http.end(second)
    texts = {0: "", 1: ""}
    async for chunk in await stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "a", 1: "bb"}


async def test_choices_of_one_answer_count_their_prompt_once(http: Http) -> None:
    asking = asyncio.ensure_future(http.client.completions.create(model="toy", prompt="hi", n=2))
    for text in ("one", "two"):
        await http.answer(text)
    answer = await asking
    assert [(one.index, one.text) for one in answer.choices] == [(0, "one"), (1, "two")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
    assert (answer.model_extra or {})["metrics"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_in_one_request(http: Http, stream: bool) -> None:
    asking = asyncio.ensure_future(
        http.raw.post("/v1/completions", json={"model": "toy", "prompt": ["a", [98, 99]], "n": 2, "stream": stream})
    )
    for submit in [await http.submitted() for _ in range(4)]:
        prompt = bytes(submit.request.prompt_token_ids).decode()
        http.say(submit, f"{prompt}{submit.request.choice_index}")
        http.end(submit)
    response = await asking
    texts = ["", "", "", ""]
    if stream:
        for line in response.text.split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        texts = [one["text"] for one in response.json()["choices"]]
        assert response.json()["usage"]["prompt_tokens"] == 3
    assert texts == ["a0", "a1", "bc0", "bc1"]


async def test_a_completion_with_a_stop_string(http: Http) -> None:
    asking = asyncio.ensure_future(http.client.completions.create(model="toy", prompt="hi", stop=["END", "X"]))
    submit = await http.answer("abEND", finish=Finish(reason=FinishReason.STOP, stop_string_index=0))
    assert submit.request.stop.strings == ("END", "X")
    assert submit.request.stop.max_tokens == 16
    answer = await asking
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert (answer.choices[0].model_extra or {})["stop_reason"] == "END"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_log_probabilities_of_a_chat(http: Http) -> None:
    asking = asyncio.ensure_future(http.client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2))
    submit = await http.answer("é!", per_step=3)
    assert submit.request.top_logprobs == 2
    logprobs = (await asking).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.token for one in logprobs.content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert [one.bytes for one in logprobs.content] == [[0xC3], [0xA9], [0x21]]
    assert [[(top.token, top.logprob) for top in one.top_logprobs] for one in logprobs.content][2] == [
        ("!", -0.5),
        ("x", -1.5),
    ]


async def test_log_probabilities_of_a_completion(http: Http) -> None:
    asking = asyncio.ensure_future(http.client.completions.create(model="toy", prompt="hi", logprobs=2, stream=True))
    await http.answer("abc", per_step=2)
    parts = [chunk.choices[0].logprobs async for chunk in await asking]
    shown = [one for one in parts if one is not None]
    assert [one.tokens for one in shown] == [["a", "b"], ["c"]]
    assert [one.text_offset for one in shown] == [[0, 1], [2]]
    assert [one.token_logprobs for one in shown] == [[-0.5, -0.5], [-0.5]]
    assert shown[0].top_logprobs == [{"a": -0.5, "x": -1.5}, {"b": -0.5, "x": -1.5}]


async def test_speculation_is_reported_as_by_vllm(http: Http) -> None:
    asking = asyncio.ensure_future(http.client.completions.create(model="toy", prompt="hi", seed=3))
    await http.answer("abcdefgh")
    metrics = ((await asking).model_extra or {})["metrics"]
    assert metrics["speculative_decoding"] == {
        "num_spec_steps": 3,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 4,
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 0, 2, 0],
        "num_spec_tokens": 3,
    }
    assert (metrics["outrider"]["reason"], metrics["outrider"]["seed"]) == ("on", 3)


async def test_vllms_names_reach_the_engine(http: Http) -> None:
    extra = {
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "priority": 3,
        "request_id": "r-7",
        "speculation": {"preference": "off", "max_tokens": 2},
        "use_beam_search": False,
        "echo": None,
    }
    asking = asyncio.ensure_future(
        http.client.completions.create(
            model="toy", prompt="hi", logit_bias={"65": 2}, presence_penalty=1, extra_body=extra
        )
    )
    submit = await http.answer("a")
    request = submit.request
    assert (request.sampling.top_k, request.sampling.min_p, request.sampling.repetition_penalty) == (0, 0.1, 1.2)
    assert request.sampling.logit_bias == ((65, 2.0),)
    assert request.sampling.presence_penalty == 1.0
    assert (request.stop.min_tokens, request.stop.token_ids, request.stop.skip_special_tokens) == (2, (9,), False)
    assert (request.priority, request.request_id) == (-3, "r-7")
    assert (request.speculation.preference.value, request.speculation.max_tokens) == ("off", 2)
    answer = await asking
    assert answer.id == "cmpl-r-7"
    assert (answer.choices[0].model_extra or {})["token_ids"] == [97]


async def test_the_model_is_listed(http: Http) -> None:
    listed = [one async for one in http.client.models.list()]
    assert [(one.id, one.owned_by) for one in listed] == [("toy", "outrider")]
    assert (await http.client.models.retrieve("toy")).model_extra == {
        "root": "toy",
        "parent": None,
        "max_model_len": 1024,
    }
    with pytest.raises(openai.NotFoundError):
        await http.client.models.retrieve("meta/other")


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("completions", {"prompt": "hi", "top_p": 2}, "top_p"),
        ("completions", {"prompt": "hi", "max_tokens": "5"}, "max_tokens"),
        ("completions", {"prompt": "hi", "nonsense": 1}, "nonsense"),
        ("completions", {"prompt": "hi", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "hi", "logprobs": 99}, "logprobs"),
        ("completions", {"prompt": "hi", "stop": ["a", 5]}, "stop"),
        ("completions", {"prompt": "hi", "stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"prompt": "hi", "logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"prompt": "hi", "min_tokens": -1}, "min_tokens"),
        ("completions", {"prompt": "hi", "top_k": 2**40}, "top_k"),
        ("completions", {"prompt": ["a"] * 65}, "prompt"),
        ("completions", {"prompt": [["a"]]}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [999]}, "prompt"),
        ("completions", {}, "prompt"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "villain", "content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": 1}]}, "tools"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "language": "fr"}]}]},
            "messages[0].content[0].language",
        ),
    ],
)
async def test_a_bad_request_names_the_clients_own_field(
    http: Http, path: str, wrong: dict[str, Any], param: str
) -> None:
    response = await http.raw.post(f"/v1/{path}", json={"model": "toy", **wrong})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)
    assert error["message"].startswith(error["param"])
    assert http.world.service.running_requests == 0


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"[" * 100_000, b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff", b""]
)
async def test_a_body_that_is_no_json_object(http: Http, body: bytes) -> None:
    response = await http.raw.post("/v1/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")
    assert len(response.text) < 500


async def test_routes_that_do_not_exist(http: Http) -> None:
    for response, status in (
        (await http.raw.get("/nothing"), 404),
        (await http.raw.get("/v1/completions"), 405),
    ):
        assert (response.status_code, response.json()["error"]["type"]) == (status, "invalid_request_error")
    assert response.headers["allow"] == "POST"


async def test_another_model_is_not_found(http: Http) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await http.client.completions.create(model="other", prompt="hi")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_key_is_needed_and_keys_change_live(http: Http) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
        response = await http.raw.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert (await http.raw.get("/v1/models", headers=headers)).status_code == 401
    assert (await http.raw.get("/health", headers={"authorization": ""})).status_code == 200
    http.keys.replace([ApiKey(key_id="new", digest=digest_of("or-new"))])
    with pytest.raises(openai.AuthenticationError):
        await http.client.models.list()
    assert (await http.raw.get("/v1/models", headers={"x-api-key": "or-new", "authorization": ""})).status_code == 200


async def test_a_key_over_its_limit_is_told_when_to_come_back() -> None:
    async with served(limits=KeyLimits(requests_per_minute=1)) as http:
        asking = asyncio.ensure_future(http.client.completions.create(model="toy", prompt="hi"))
        await http.answer("a")
        await asking
        with pytest.raises(openai.RateLimitError) as caught:
            await http.client.completions.create(model="toy", prompt="hi")
        assert caught.value.response.headers["retry-after"] == "60"
        asking = asyncio.ensure_future(http.other.completions.create(model="toy", prompt="hi"))
        await http.answer("b")
        assert (await asking).choices[0].text == "b"


async def test_a_full_router_refuses() -> None:
    limits = replace(LIMITS, admission=AdmissionLimits(max_requests=1))
    async with served(router_limits=limits) as http:
        running = asyncio.ensure_future(http.client.completions.create(model="toy", prompt="hi"))
        submit = await http.submitted()
        with pytest.raises(openai.RateLimitError, match="1 requests are in flight"):
            await http.other.completions.create(model="toy", prompt="hi")
        http.end(submit)
        await running


def test_a_client_that_waits_as_told_does_not_come_early() -> None:
    response = as_response(failure_of(Overloaded("full", retry_after_s=0.1204)))
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("1", "121")


async def test_running_ids_are_those_of_a_key(http: Http) -> None:
    body = {"prompt": "hi", "model": "toy"}
    mine = asyncio.ensure_future(http.raw.post("/v1/completions", json=body, headers={"x-request-id": "r1"}))
    first = await http.submitted()
    again = await http.raw.post("/v1/completions", json=body, headers={"x-request-id": "r1"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "duplicate_request")
    headers = {"x-request-id": "r1", "authorization": f"Bearer {OTHER_KEY}"}
    others = asyncio.ensure_future(http.raw.post("/v1/completions", json=body, headers=headers))
    second = await http.submitted()
    for submit in (first, second):
        http.end(submit)
    assert [(await one).headers["x-request-id"] for one in (mine, others)] == ["r1", "r1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_beyond_ascii_is_told_percent_encoded(http: Http, stream: bool) -> None:
    body = {"prompt": "hi", "request_id": "für 日/1%", "stream": stream}
    asking = asyncio.ensure_future(http.raw.post("/v1/completions", json=body))
    await http.answer("a")
    response = await asking
    assert (response.status_code, response.headers["x-request-id"]) == (200, "f%C3%BCr %E6%97%A5/1%")
    assert '"cmpl-für 日/1%"' in response.text


async def test_a_client_that_leaves_before_the_first_byte_frees_the_stream() -> None:
    left: list[str] = []

    async def admitted() -> AsyncGenerator[str, None]:
        try:
            yield "accepted"
            yield "text"
        finally:
            left.append("closed")

    async def written() -> AsyncGenerator[bytes, None]:
        async for one in source:
            yield one.encode()

    async def stays() -> Any:
        await asyncio.Event().wait()

    async def gone(message: Any) -> None:
        raise OSError("the client has left")

    source = admitted()
    await anext(source)
    await EventStream(written(), source=source, request_id="r", headers={}, stalled_timeout_s=30)({}, stays, gone)
    assert left == ["closed"]


async def test_no_engine_means_unavailable(http: Http) -> None:
    http.world.engine.unreachable = RuntimeError("no")
    http.world.engine.session.lose("gone")
    await until(lambda: not http.world.pool.statuses()[0].ready)
    response = await http.raw.get("/health")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(("code", "status"), [(SequenceErrorCode.DEADLINE, 504), (SequenceErrorCode.INVALID, 400)])
async def test_failures_of_the_engine_have_a_status(http: Http, code: SequenceErrorCode, status: int) -> None:
    asking = asyncio.ensure_future(http.raw.post("/v1/completions", json={"prompt": "hi"}))
    http.world.engine.fail(await http.submitted(), code, "timeout_ms: passed")
    response = await asking
    assert response.status_code == status
    assert "timeout_ms" in response.json()["error"]["message"]


async def test_an_error_under_way_ends_the_stream(http: Http) -> None:
    stream = await asyncio.ensure_future(http.client.completions.create(model="toy", prompt="hi", stream=True))
    submit = await http.submitted()
    http.say(submit, "a")
    http.world.engine.fail(submit, SequenceErrorCode.DEADLINE, "timeout_ms: passed")
    with pytest.raises(openai.APIError, match="timeout_ms: passed"):
        [chunk async for chunk in stream]


async def test_an_error_that_nobody_expected_shows_an_id_alone(http: Http) -> None:
    def broken(text: str) -> list[int]:
        raise RuntimeError("secret of /etc/passwd")

    http.world.service._codec.encode = broken  # type: ignore[method-assign]
    with pytest.raises(openai.InternalServerError) as caught:
        await http.client.completions.create(model="toy", prompt="hi")
    assert "internal error" in caught.value.message
    assert "secret" not in caught.value.response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 2])
async def test_a_client_that_leaves_frees_its_sequences(http: Http, stream: bool, prompts: int) -> None:
    body = {"model": "toy", "prompt": ["hi"] * prompts, "stream": stream, "max_tokens": 100}
    asking = asyncio.create_task(http.raw.post("/v1/completions", json=body))
    submits = [await http.submitted() for _ in range(prompts)]
    for submit in submits:
        http.say(submit, "a")
    asking.cancel()
    async with asyncio.timeout(10):
        while http.world.service.running_requests:  # noqa: ASYNC110 - plain state of the code under test
            await asyncio.sleep(0.01)
    assert sorted(http.world.engine.session.aborted) == sorted(one.stream_key for one in submits)


async def test_a_body_that_is_too_large_is_refused_unread() -> None:
    async with served(options=DoorOptions(max_body_bytes=1000)) as http:
        for content in (b"x" * 1001, chunks_of(b"x" * 100, 11)):
            response = await http.raw.post("/v1/completions", content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        fits = json.dumps({"prompt": "", "user": "x" * 900}).encode()
        assert (await http.raw.post("/v1/completions", content=fits)).status_code == 400


async def chunks_of(data: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield data


async def test_a_client_that_reads_nothing_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async with served(options=DoorOptions(stalled_timeout_s=0.2)) as http:
        body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 900, "request_id": "deaf"}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(deaf.connect, (http.raw.base_url.host, http.raw.base_url.port))
            deaf.sendall(head.encode() + body)
            submit = await http.submitted()
            at, step = 0, 4000
            async with asyncio.timeout(30):
                while http.world.service.running_requests:
                    http.world.engine.tokens(submit, at, *b"x" * step)
                    at += step
                    await asyncio.sleep(0.001)
        assert http.world.engine.session.aborted == [submit.stream_key]
    (said,) = [vars(one) for one in caplog.records if "is cut off" in one.getMessage()]
    assert said["request_id"] == "deaf"

"""`vllm bench serve` at the HTTP door: the bodies that it sends, byte for byte, and the stream as it reads it.

Written from what vLLM 0.33 does for `--backend openai` and `--backend openai-chat`; the tool itself has been
run against a served deployment (see the benchmarks' notes). It takes no answer but these events: separated by
an empty line, data behind `data: `, output in the first choice, and counts in an event without choices.
"""

import asyncio
import json
from dataclasses import dataclass

import pytest
from tests.contract.test_openai_door import Http, served

pytestmark = pytest.mark.timeout(60)

COMPLETION = (
    b'{"model": "toy", "prompt": "the caf\\u00e9", "repetition_penalty": 1.0, "max_tokens": 6, "logprobs": null, '
    b'"stream": true, "stream_options": {"include_usage": true}}'
)
COMPLETION_WITH_EVERYTHING = (
    b'{"model": "toy", "prompt": [116, 104, 101], "repetition_penalty": 1.1, "max_tokens": 6, "logprobs": 3, '
    b'"stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true, "top_p": 0.9, "top_k": 20, '
    b'"min_p": 0.01, "temperature": 0.7, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 5}'
)
CHAT = (
    b'{"model": "toy", "messages": [{"role": "user", "content": [{"type": "text", "text": "the caf\\u00e9"}]}], '
    b'"max_completion_tokens": 6, "stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true, '
    b'"temperature": 0.0}'
)


@dataclass
class Measured:
    """What the tool knows of one request when its stream has ended."""

    text: str = ""
    output_chunks: int = 0
    """The first gives the time to first token, each later one an inter-token latency."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    done: bool = False


def read_as_the_tool_does(pieces: list[bytes], *, chat: bool) -> Measured:
    """Take the stream in pieces as a connection may hand them over."""
    measured, buffer = Measured(), b""
    for piece in pieces:
        buffer += piece
        while b"\n\n" in buffer:
            message, _, buffer = buffer.partition(b"\n\n")
            data = message.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                measured.done = True
                continue
            event = json.loads(data)
            choices = event["choices"]
            if choices and (not chat or shows_output(choices[0]["delta"])):
                measured.output_chunks += 1
                measured.text += (choices[0]["delta"]["content"] if chat else choices[0]["text"]) or ""
            elif not choices:
                measured.output_tokens = event["usage"]["completion_tokens"]
                measured.prompt_tokens = event["usage"]["prompt_tokens"]
    assert buffer == b""
    return measured


def shows_output(delta: dict[str, str]) -> bool:
    """The chunk that only names the speaker is no output, nor is the one that only says why it ended."""
    content = delta.get("content")
    return bool(content) or (content == "" and "role" not in delta)


async def stream_of(http: Http, path: str, body: bytes) -> list[bytes]:
    headers = {"content-type": "application/json", "x-request-id": "bench-0"}
    async with http.raw.stream("POST", path, content=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        return [piece async for piece in response.aiter_raw()]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION_WITH_EVERYTHING),
        ("/v1/chat/completions", CHAT),
    ],
    ids=["completion", "completion-with-everything", "chat"],
)
async def test_its_requests_are_measured_whole(path: str, body: bytes) -> None:
    chat = body is CHAT
    async with served() as http:
        asking = asyncio.ensure_future(stream_of(http, path, body))
        submit = await http.answer("héllo", per_step=2)
        pieces = await asking
    assert submit.request.stop.max_tokens == 6
    assert (submit.request.stop.eos_token_ids == ()) == (b"ignore_eos" in body)
    whole = b"".join(pieces)
    for size in (1, 7, len(whole)):  # network and HTTP cut where they like
        cut = [whole[at : at + size] for at in range(0, len(whole), size)]
        measured = read_as_the_tool_does(cut, chat=chat)
        assert measured.text == "héllo"
        assert (measured.prompt_tokens, measured.output_tokens) == (len(submit.request.prompt_token_ids), 6)
        # Three steps of two tokens; a completion's end is a chunk with a choice as well.
        assert measured.output_chunks == (3 if chat else 4)
        assert measured.done


async def test_what_it_asks_for_beside_requests_is_answered_in_words() -> None:
    async with served() as http:
        for path in ("/tokenize", "/start_profile"):
            response = await http.raw.post(path, json={"model": "toy", "prompt": "a"})
            assert (response.status_code, response.json()["error"]["message"]) == (404, "Not Found")
        assert (await http.raw.get("/metrics")).status_code == 404
        assert [one["id"] for one in (await http.raw.get("/v1/models")).json()["data"]] == ["toy"]

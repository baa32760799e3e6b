"""The HTTP door over Serve's own proxy, beside gRPC on the same router: OpenAI's client, keys, limits, leaving."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2 as httpx
import openai
import pytest
import yaml
from openai import AsyncOpenAI
from openai.types import Completion
from tests.support.certificates import Authority
from tests.support.served import Served, served

from outrider.core.errors import Overloaded, Unauthenticated
from outrider.core.generation import GenerationRequest
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.router.api_keys import digest_of, new_key
from outrider.rpc.channel_options import MAX_MESSAGE_BYTES
from outrider.rpc.client import ClientOptions, OutriderClient

# The first test waits for the cluster to start.
pytestmark = pytest.mark.timeout(240)

SERVE = Path(__file__).parents[2] / "infra" / "serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of three callers, and their file."""

    path: Path
    team: str
    meek: str
    limited: str

    def write(self, **more: str) -> None:
        """The file, with further keys by their owner."""
        owners = {"team": self.team, "meek": self.meek, "limited": self.limited, **more}
        entries: list[dict[str, Any]] = [{"id": one, "sha256": digest_of(key).hex()} for one, key in owners.items()]
        entries[2]["requests_per_minute"] = 1
        self.path.write_text(yaml.safe_dump({"keys": entries}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A deployment with keys and certificates."""

    served: Served
    keys: Keys

    def client(self, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"http://{self.served.http_address}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    settings = yaml.safe_load((SERVE / "scripted.yaml").read_text())
    files = Authority().issue("outrider.internal").save(folder)
    settings["data_plane"]["tls"] = {**files, "server_name": "outrider.internal"}
    settings["security"] = {"api_keys_file": str(folder / "keys.yaml")}
    settings["http"] = {"max_body_mib": 0.25}
    config = folder / "guarded.yaml"
    config.write_text(yaml.safe_dump(settings))
    keys = Keys(path=folder / "keys.yaml", team=new_key(), meek=new_key(), limited=new_key())
    keys.write()
    with served(config, folder / "serve.log") as cluster:
        yield Guarded(served=cluster, keys=keys)


@pytest.fixture
async def client(guarded: Guarded) -> AsyncIterator[AsyncOpenAI]:
    async with guarded.client(guarded.keys.team) as made:
        yield made


async def test_both_doors_give_the_same_text(guarded: Guarded, client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="scripted", prompt="HELLO", max_tokens=60, seed=5, logprobs=1)
    async with OutriderClient(guarded.served.address, ClientOptions(api_key=guarded.keys.team)) as grpc_client:
        request = GenerationRequest(text="HELLO", max_tokens=60, seed=5, top_logprobs=1)
        (expected,) = (await grpc_client.generate(request)).choices
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    assert answer.choices[0].logprobs.tokens == list(expected.text)


async def test_a_stream_is_the_whole_answer_in_pieces(client: AsyncOpenAI) -> None:
    wishes: Any = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "HELLO"}],
        "max_tokens": 200,
        "seed": 3,
        "n": 2,
        "temperature": 1.0,
    }
    whole = await client.chat.completions.create(**wishes)
    texts = {0: "", 1: ""}
    usage = None
    stream = await client.chat.completions.create(**wishes, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == [one.message.content for one in whole.choices]
    assert usage is not None
    assert usage == whole.usage
    assert usage.completion_tokens == 400


async def test_speculation_is_reported(client: AsyncOpenAI) -> None:
    async with asyncio.timeout(60):
        while True:  # the draft may still be on its way
            answer = await client.completions.create(
                model="scripted",
                prompt="HELLO",
                max_tokens=200,
                seed=1,
                extra_body={"speculation": {"preference": "on"}},
            )
            metrics = (answer.model_extra or {})["metrics"]["speculative_decoding"]
            if metrics is not None:
                break
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    accepted = sum(length * steps for length, steps in enumerate(metrics["acceptance_histogram"]))
    assert accepted == metrics["num_accepted_draft_tokens"] > 0


async def test_a_client_that_leaves_frees_its_sequence(guarded: Guarded, client: AsyncOpenAI) -> None:
    async with OutriderClient(guarded.served.address, ClientOptions(api_key=guarded.keys.team)) as grpc_client:
        for stream in (True, False):
            body = {"model": "scripted", "prompt": "HELLO", "max_tokens": 4000, "stream": stream, "n": 8}
            headers = {"authorization": f"Bearer {guarded.keys.team}"}
            async with httpx.AsyncClient(base_url=f"http://{guarded.served.http_address}", headers=headers) as raw:
                asking = asyncio.create_task(raw.post("/v1/completions", json=body))
                await running(grpc_client, 8)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await running(grpc_client, 0)


async def running(client: OutriderClient, count: int) -> None:
    async with asyncio.timeout(30):
        while (await client.speculation_status())[0].running != count:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def test_many_streams_at_once_are_those_of_each_alone(client: AsyncOpenAI) -> None:
    async def text(seed: int, *, stream: bool) -> str:
        wishes: Any = {"model": "scripted", "prompt": "HELLO", "max_tokens": 150, "seed": seed}
        if not stream:
            whole: Completion = await client.completions.create(**wishes)
            return whole.choices[0].text
        chunks = await client.completions.create(**wishes, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    together = await asyncio.gather(*(text(seed, stream=True) for seed in range(24)))
    for seed in (0, 11, 23):
        assert together[seed] == await text(seed, stream=False)
    assert len(set(together)) == 24


async def test_no_key_waits_for_all_that_another_has_sent(guarded: Guarded) -> None:
    wishes: Any = {"model": "scripted", "prompt": "HELLO", "max_tokens": 300, "extra_body": {"priority": -100}}
    async with (
        guarded.client(guarded.keys.team) as greedy,
        guarded.client(guarded.keys.meek) as meek,
        OutriderClient(guarded.served.address, ClientOptions(api_key=guarded.keys.team)) as grpc_client,
    ):
        crowd = [asyncio.ensure_future(greedy.completions.create(**wishes)) for _ in range(80)]
        async with asyncio.timeout(60):
            while (await grpc_client.speculation_status())[0].waiting < 60:
                assert not all(one.done() for one in crowd)
                await asyncio.sleep(0.01)
        await meek.completions.create(**wishes | {"extra_body": {"priority": 100}})
        assert sum(one.done() for one in crowd) < 60, "in order of arrival it would be the last of all"
        await asyncio.gather(*crowd)


async def test_errors_are_openais(guarded: Guarded, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="scripted", prompt="A", top_p=2)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="A")
    headers = {"authorization": f"Bearer {guarded.keys.team}"}
    async with httpx.AsyncClient(base_url=f"http://{guarded.served.http_address}", headers=headers) as raw:
        large = json.dumps({"prompt": "x" * (1 << 18)}).encode()
        assert (await raw.post("/v1/completions", content=large)).status_code == 413
        assert (await raw.get("/health")).status_code == 200
        assert (await raw.get("/v1/models")).json()["data"][0]["id"] == "scripted"
        response = await raw.post("/v1/completions", json={"prompt": "A", "timeout_ms": 1, "max_tokens": 4000})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_keys_hold_at_both_doors(guarded: Guarded) -> None:
    async with guarded.client("or-unknown") as nobody:
        with pytest.raises(openai.AuthenticationError):
            await nobody.models.list()
    async with OutriderClient(guarded.served.address) as nobody_grpc:
        with pytest.raises(Unauthenticated, match="an API key is needed"):
            await nobody_grpc.generate(GenerationRequest(text="A", max_tokens=1))
        with pytest.raises(Unauthenticated):
            await nobody_grpc.speculation_status()
        with pytest.raises(Unauthenticated):
            await nobody_grpc.abort("anything")


async def test_serves_proxy_refuses_junk_and_what_is_too_large(guarded: Guarded) -> None:
    metadata = [("authorization", f"Bearer {guarded.keys.team}")]
    async with grpc.aio.insecure_channel(
        guarded.served.address, options=[("grpc.max_send_message_length", 1 << 28)]
    ) as channel:
        raw: Any = channel  # the stubs want the serializers that this test does without
        for method in ("GenerationService/Generate", "ModelService/GetModelInfo"):
            call = raw.unary_unary(f"/outrider.v1.{method}")(b"\xff\xff", timeout=20, metadata=metadata)
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == "request: is not a protobuf message of this method"
        stream = raw.unary_stream("/outrider.v1.GenerationService/StreamGenerate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [one async for one in stream(b"\xff\xff", timeout=20, metadata=metadata)]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        call = raw.unary_unary("/outrider.v1.GenerationService/Generate")(bytes(MAX_MESSAGE_BYTES + 1), timeout=20)
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_request_belongs_to_its_key(guarded: Guarded, client: AsyncOpenAI) -> None:
    body: Any = {"model": "scripted", "prompt": "HELLO", "max_tokens": 4000}
    asking = asyncio.ensure_future(client.completions.create(**body, extra_body={"request_id": "mine"}))
    async with (
        OutriderClient(guarded.served.address, ClientOptions(api_key=guarded.keys.team)) as owner,
        OutriderClient(guarded.served.address, ClientOptions(api_key=guarded.keys.limited)) as other,
    ):
        await running(owner, 1)
        assert not await other.abort("mine")
        with pytest.raises(openai.ConflictError):
            await client.completions.create(**body, extra_body={"request_id": "mine"})
        assert await owner.abort("mine")
    answer = await asking
    assert answer.choices[0].finish_reason == "abort"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 4000


async def test_the_limits_of_a_key_hold_over_both_doors(guarded: Guarded) -> None:
    options = ClientOptions(api_key=guarded.keys.limited)
    off = SpeculationChoice(preference=SpeculationPreference.OFF)
    async with (
        OutriderClient(guarded.served.address, options) as grpc_client,
        guarded.client(guarded.keys.limited) as http,
    ):
        await grpc_client.generate(GenerationRequest(text="A", max_tokens=1, speculation=off))
        with pytest.raises(openai.RateLimitError) as caught:
            await http.completions.create(model="scripted", prompt="A", max_tokens=1)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        with pytest.raises(Overloaded, match="1 requests per minute") as refused:
            await grpc_client.generate(GenerationRequest(text="A", max_tokens=1, speculation=off))
        assert 0 < refused.value.retry_after_s <= 60


async def test_keys_change_while_it_runs(guarded: Guarded) -> None:
    fresh = new_key()
    guarded.keys.path.write_text("keys: [")  # a mistake locks nobody out
    async with guarded.client(guarded.keys.team) as client, guarded.client(fresh) as newcomer:
        await client.models.list()
        guarded.keys.write(fresh=fresh)
        async with asyncio.timeout(30):
            while not await accepted(newcomer):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        guarded.keys.write()
        async with asyncio.timeout(30):
            while await accepted(newcomer):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        await client.models.list()


async def accepted(client: AsyncOpenAI) -> bool:
    try:
        await client.models.list()
    except openai.AuthenticationError:
        return False
    return True

"""The deployment end to end over Serve's ingress, with the scripted engine on a local Ray cluster."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.drafting import wait_until_drafting
from tests.support.served import Served

from outrider.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Unsupported,
)
from outrider.core.generation import ChoiceEnd, GenerationRequest, TextDelta
from outrider.core.sequence import FinishReason
from outrider.core.speculation import SpeculationChoice, SpeculationPreference, SpeculationReason
from outrider.rpc.client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

# The first test of the session waits for the cluster to start.
pytestmark = pytest.mark.timeout(240)

LONG = 1500
ON = SpeculationChoice(preference=SpeculationPreference.ON)
OFF = SpeculationChoice(preference=SpeculationPreference.OFF)


def request(
    *, max_tokens: int = 200, seed: int = 1, speculation: SpeculationChoice = OFF, request_id: str = ""
) -> GenerationRequest:
    return GenerationRequest(
        text="HELLO", max_tokens=max_tokens, seed=seed, speculation=speculation, request_id=request_id
    )


@pytest.fixture
async def client(scripted_cluster: Served) -> AsyncIterator[OutriderClient]:
    async with OutriderClient(scripted_cluster.address) as made:
        yield made


async def test_speculation_changes_nothing_but_the_number_of_rounds(client: OutriderClient) -> None:
    await wait_until_drafting(client)
    on, off = await client.generate(request(speculation=ON)), await client.generate(request())
    assert on.choices[0].token_ids == off.choices[0].token_ids
    assert on.choices[0].text == off.choices[0].text
    end = on.choices[0].end
    assert end.speculation.reason is SpeculationReason.ON
    assert end.usage.completion_tokens == 200
    assert end.speculation.stats.rounds < 150
    assert off.choices[0].end.speculation.stats.rounds == 200
    assert off.choices[0].end.speculation.reason is SpeculationReason.CLIENT_OFF


async def test_a_seed_gives_its_text_again_and_another_gives_another(client: OutriderClient) -> None:
    first, again, other = [await client.generate(request(seed=seed)) for seed in (5, 5, 6)]
    assert first.choices[0].token_ids == again.choices[0].token_ids
    assert first.choices[0].token_ids != other.choices[0].token_ids


async def test_choices_of_one_request_differ_and_none_depends_on_speculation(client: OutriderClient) -> None:
    on, off = [
        await client.generate(replace(request(max_tokens=80, speculation=choice), n=2, temperature=1.0))
        for choice in (ON, OFF)
    ]
    assert [one.token_ids for one in on.choices] == [one.token_ids for one in off.choices]
    assert on.choices[0].token_ids != on.choices[1].token_ids


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
        {"logit_bias": ((3, 4.0), (7, -100.0)), "min_tokens": 20},
        {"stop": ("ZZ", "Q"), "include_stop_str": True},
        {"top_logprobs": 3, "temperature": 1.4},
    ],
    ids=lambda wishes: "+".join(wishes),
)
async def test_every_sampling_parameter_is_lossless(client: OutriderClient, wishes: dict[str, Any]) -> None:
    on, off = [
        (await client.generate(replace(request(max_tokens=60, seed=9, speculation=choice), **wishes))).choices[0]
        for choice in (ON, OFF)
    ]
    assert (on.token_ids, on.text, on.end.finish) == (off.token_ids, off.text, off.end.finish)
    assert [one.logprob for one in on.logprobs] == pytest.approx([one.logprob for one in off.logprobs], abs=1e-5)


async def test_many_streams_at_once_are_those_of_each_alone(client: OutriderClient) -> None:
    seeds = range(12)
    together = await asyncio.gather(*(client.generate(request(seed=seed, speculation=ON)) for seed in seeds))
    for seed, result in zip(seeds, together, strict=True):
        assert result.choices[0].token_ids == (await client.generate(request(seed=seed))).choices[0].token_ids


async def test_the_unary_call_answers_like_the_stream(scripted_cluster: Served, client: OutriderClient) -> None:
    async with grpc.aio.insecure_channel(scripted_cluster.address) as channel:
        spec = pb.GenerationSpec(text="HELLO", max_tokens=50, seed=1)
        response = await generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            pb.GenerateRequest(spec=spec), timeout=30
        )
    assert tuple(response.choices[0].token_ids) == (await client.generate(request(max_tokens=50))).choices[0].token_ids


async def test_the_model_is_described(client: OutriderClient) -> None:
    info = await client.model_info()
    assert (info.model, info.max_model_len, info.vocab_size) == ("scripted", 4096, 64)
    assert info.max_num_speculative_tokens == 16


async def test_status_shows_the_engine_and_its_draft(client: OutriderClient) -> None:
    await wait_until_drafting(client)
    (engine,) = await client.speculation_status()
    assert engine.ready
    assert engine.reason is SpeculationReason.ON
    assert [link.connected for link in engine.draft_links] == [True]


@pytest.mark.parametrize(
    ("wrong", "error", "field"),
    [
        (GenerationRequest(text="A", max_tokens=4096), InvalidRequest, "max_tokens"),
        (GenerationRequest(text="A", temperature=-1.0), InvalidRequest, "temperature"),
        (GenerationRequest(), InvalidRequest, "input"),
        (GenerationRequest(text="A", n=17), InvalidRequest, "n"),
        (GenerationRequest(text="A", adapter="x"), Unsupported, "adapter"),
    ],
)
async def test_a_bad_request_is_refused_by_field(
    client: OutriderClient, wrong: GenerationRequest, error: type[InvalidRequest], field: str
) -> None:
    with pytest.raises(error) as caught:
        await client.generate(wrong)
    assert caught.value.field == field


async def test_another_model_is_not_found(client: OutriderClient) -> None:
    with pytest.raises(ModelNotFound, match="scripted"):
        await client.generate(GenerationRequest(text="A", model="other"))
    with pytest.raises(ModelNotFound):
        await client.model_info("other")


async def test_a_time_limit_ends_a_request(client: OutriderClient) -> None:
    with pytest.raises(DeadlineExceeded, match="timeout_ms"):
        await client.generate(GenerationRequest(text="A", max_tokens=LONG, timeout_ms=50, speculation=OFF))


async def test_an_abort_ends_a_stream_with_what_it_has(client: OutriderClient, scripted_cluster: Served) -> None:
    received: list[int] = []
    async with aclosing(client.stream(request(max_tokens=LONG, request_id="to-abort"))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                if not received:
                    async with OutriderClient(scripted_cluster.address) as other:
                        assert await other.abort("to-abort")
                received.extend(event.token_ids)
            elif isinstance(event, ChoiceEnd):
                assert event.finish.reason is FinishReason.ABORTED
                assert event.usage.completion_tokens == len(received) < LONG
    assert received
    assert not await client.abort("to-abort")


async def test_health_and_reflection_answer(scripted_cluster: Served) -> None:
    async with grpc.aio.insecure_channel(scripted_cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        state = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        raw: Any = channel
        for name in ("Check", "List"):
            with pytest.raises(grpc.aio.AioRpcError, match="is not a protobuf message") as caught:
                await raw.unary_unary(f"/grpc.health.v1.Health/{name}")(b"\xff\xff", timeout=10)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="is not a protobuf message") as caught:
            [one async for one in raw.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff", timeout=10)]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        names = {service.name async for answer in call for service in answer.list_services_response.service}
    assert {"outrider.v1.GenerationService", "outrider.v1.ModelService", "grpc.health.v1.Health"} <= names


async def test_the_gate_changes_live_and_the_engine_stays(client: OutriderClient, scripted_cluster: Served) -> None:
    await wait_until_drafting(client)
    await client.generate(request())
    (before,) = await client.speculation_status()
    text = scripted_cluster.config.read_text()
    scripted_cluster.reload(text.replace("speculation:\n", "speculation:\n  preference: off\n"))
    await wait_for_reason(client, SpeculationReason.OPERATOR_OFF)
    off = (await client.generate(request(speculation=SpeculationChoice()))).choices[0].end.speculation
    assert (off.reason, off.stats.drafted) == (SpeculationReason.OPERATOR_OFF, 0)
    scripted_cluster.reload(text)
    await wait_for_reason(client, SpeculationReason.ON)
    (after,) = await client.speculation_status()
    assert after.engine_id == before.engine_id
    assert after.totals.steps > before.totals.steps


async def wait_for_reason(client: OutriderClient, reason: SpeculationReason) -> None:
    async with asyncio.timeout(30):
        while (await client.speculation_status())[0].reason is not reason:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


async def test_losing_the_draft_changes_nothing_and_its_return_speeds_up_again(
    client: OutriderClient, scripted_cluster: Served
) -> None:
    await wait_until_drafting(client)
    expected = await client.generate(request(max_tokens=LONG))
    text, killed, end = "", False, None
    async with aclosing(client.stream(request(max_tokens=LONG, speculation=ON))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
                if not killed and len(text) > 100:
                    scripted_cluster.kill("ServeReplica:outrider:Draft")
                    killed = True
            elif isinstance(event, ChoiceEnd):
                end = event
    assert killed
    assert text == expected.choices[0].text
    assert end is not None
    assert 0 < end.speculation.stats.speculative_rounds < end.speculation.stats.rounds
    await wait_until_drafting(client)
    again = await client.generate(request(speculation=ON))
    assert again.choices[0].end.speculation.stats.speculative_rounds > 0
    assert again.choices[0].text == expected.choices[0].text[:200]


@pytest.mark.parametrize("victim", ["PeerRankActor", "PrimaryRankActor"])
async def test_streams_of_a_dead_rank_go_on_when_its_engine_is_rebuilt(
    client: OutriderClient, scripted_cluster: Served, victim: str
) -> None:
    seeds = (1, 2)
    expected = [await client.generate(request(max_tokens=LONG, seed=seed)) for seed in seeds]
    (before,) = await client.speculation_status()
    under_way = asyncio.Semaphore(0)
    streams = [asyncio.ensure_future(read(client, seed, under_way)) for seed in seeds]
    async with asyncio.timeout(30):
        for _ in seeds:
            await under_way.acquire()
    scripted_cluster.kill(victim)
    for (text, token_ids, end), whole in zip(await asyncio.gather(*streams), expected, strict=True):
        assert (text, tuple(token_ids)) == (whole.choices[0].text, whole.choices[0].token_ids)
        assert end.usage == whole.choices[0].end.usage
        assert end.speculation.stats.committed < LONG, "the engine that was lost made a part"
    (after,) = await client.speculation_status()
    assert after.ready
    assert after.engine_id == before.engine_id


async def read(client: OutriderClient, seed: int, under_way: asyncio.Semaphore) -> tuple[str, list[int], ChoiceEnd]:
    """Text, ids and end of a stream that the client does not resume."""
    text, token_ids = "", list[int]()
    async with aclosing(client.stream(request(max_tokens=LONG, seed=seed))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                if not token_ids:
                    under_way.release()
                text += event.text
                token_ids += event.token_ids
            elif isinstance(event, ChoiceEnd):
                return text, token_ids, event
    raise AssertionError("a stream without an end")


async def test_a_hung_rank_is_found_by_its_silence_and_killed(client: OutriderClient, scripted_cluster: Served) -> None:
    expected = (await client.generate(request())).choices[0].text
    hung = scripted_cluster.signal("PeerRankActor", signal.SIGSTOP)
    async with asyncio.timeout(60):
        # The router may first see its stream break; the front's word on it follows.
        while "rank 1: no answer for 3 s" not in (await client.speculation_status())[0].problem:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await client.generate(request(), resume=True)).choices[0].text == expected
    assert not psutil.pid_exists(hung), "a stopped process would hold its memory for ever"


def test_the_status_command_prints_json(scripted_cluster: Served) -> None:
    command = [sys.executable, "-c", "from outrider_cluster.cli import main; main()", "status", "--json"]
    done = subprocess.run(
        [*command, "--address", scripted_cluster.address], capture_output=True, text=True, timeout=60, check=True
    )
    (engine,) = json.loads(done.stdout)["engines"]
    assert engine["ready"] is True
    assert engine["reason"] in {one.value for one in SpeculationReason}

"""One request through a real cluster: its spans arrive at a collector, its id in the logs, its text in neither."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from tests.support.collector import CollectedSpan, Collector
from tests.support.drafting import wait_until_drafting
from tests.support.served import Served

from outrider.rpc.client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

pytestmark = pytest.mark.timeout(240)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
PROMPT = "ZQXJKVWY"
"""Letters that nothing else writes down."""
REQUEST_ID = "traced-and-logged"


async def generate(address: str, *, traceparent: str, request_id: str) -> pb.GenerateResponse:
    spec = pb.GenerationSpec(
        request_id=request_id,
        text=PROMPT,
        max_tokens=200,
        seed=3,
        n=2,
        speculation=pb.SpeculationOptions(preference=pb.SPECULATION_PREFERENCE_ON),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answer: pb.GenerateResponse = await stub.Generate(
            pb.GenerateRequest(spec=spec), timeout=60, metadata=(("traceparent", traceparent),)
        )
    return answer


async def until(condition: Callable[[], bool], what: str) -> None:
    """Spans leave each process within a second or so."""
    try:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(what) from None


async def test_one_request_makes_one_tree_over_three_processes(collector: Collector, scripted_cluster: Served) -> None:
    async with OutriderClient(scripted_cluster.address) as client:
        await wait_until_drafting(client)
    await generate(scripted_cluster.address, traceparent=f"00-{TRACE_ID}-{CLIENT_SPAN}-01", request_id=REQUEST_ID)

    def of_request() -> list[CollectedSpan]:
        return [one for one in collector.spans() if one.trace_id == TRACE_ID]

    def named(name: str) -> list[CollectedSpan]:
        return [one for one in of_request() if one.name == name]

    def complete() -> bool:
        ends = ("outrider.request", "outrider.engine.sequence", "outrider.draft.sequence")
        return [len(named(name)) for name in ends] == [1, 2, 2]

    await until(complete, f"only {[one.name for one in of_request()]}")
    by_id = {one.span_id: one for one in of_request()}
    parents = {(one.name, by_id[one.parent_id].name) for one in of_request() if one.parent_id in by_id}
    assert parents == {
        ("tokenize", "outrider.request"),
        ("outrider.engine.sequence", "outrider.request"),
        ("queue", "outrider.engine.sequence"),
        ("prefill", "outrider.engine.sequence"),
        ("decode", "outrider.engine.sequence"),
        ("round", "outrider.engine.sequence"),
        ("outrider.draft.sequence", "outrider.engine.sequence"),
        ("draft", "outrider.draft.sequence"),
    }
    (root,) = named("outrider.request")
    assert root.parent_id == CLIENT_SPAN
    assert {one.parent_id for one in of_request()} - by_id.keys() == {CLIENT_SPAN}
    assert {one.service for one in of_request()} == {"outrider-router", "outrider-target", "outrider-draft"}
    assert {one.attributes.get("outrider.request_id") for one in named("outrider.engine.sequence")} == {REQUEST_ID}
    steps = {one.span_id: one for one in collector.spans() if one.name == "outrider.engine.step"}
    linked = [link for one in named("round") for link in one.links]
    assert linked
    assert steps.keys() >= set(linked)
    sequences = {one.span_id for one in named("outrider.engine.sequence")}
    assert {link for one in steps.values() for link in one.links} & sequences == sequences
    assert PROMPT.encode() not in b"".join(collector.raw)


async def test_a_request_without_a_sampled_trace_sends_nothing(collector: Collector, scripted_cluster: Served) -> None:
    other = "1" * 32
    await generate(scripted_cluster.address, traceparent=f"00-{other}-{CLIENT_SPAN}-00", request_id="untraced")
    marker = "2" * 32
    await generate(scripted_cluster.address, traceparent=f"00-{marker}-{CLIENT_SPAN}-01", request_id="marker")
    # Spans leave in order: once the later request's are here, the earlier one's would be.
    await until(
        lambda: (
            {"outrider-router", "outrider-target", "outrider-draft"}
            <= {one.service for one in collector.spans() if one.trace_id == marker}
        ),
        "the marker's spans did not arrive",
    )
    assert [one.name for one in collector.spans() if one.trace_id == other] == []


@pytest.fixture
def log_folder(scripted_cluster: Served) -> Path:
    """Where Ray keeps what the processes of this cluster write."""
    for child in scripted_cluster.process.children(recursive=True):
        try:
            found = re.search(r"--session[-_]dir=(\S+)", " ".join(child.cmdline()))
        except psutil.NoSuchProcess:
            continue
        if found:
            return Path(found[1]) / "logs"
    raise AssertionError("no process of Ray names its session")


def own_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Ours, not those of Serve."""
    for path in folder.rglob("worker-*.err"):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{") and "service" in (found := json.loads(line)):
                yield found


def files_with(folder: Path, text: bytes) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


async def test_logs_name_the_request_and_never_its_text(log_folder: Path, scripted_cluster: Served) -> None:
    await generate(scripted_cluster.address, traceparent="", request_id="logged-only")
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(scripted_cluster.address, traceparent="", request_id="x" * 500)

    def ended() -> list[dict[str, Any]]:
        return [one for one in own_lines(log_folder) if one.get("request_id") == "logged-only"]

    await until(lambda: bool(ended()), "no line about the request")
    (line,) = ended()
    assert line["message"] == "request ended"
    assert (line["service"], line["outcome"], line["output_tokens"]) == ("outrider-router", "completed", 400)
    services = {one["service"] for one in own_lines(log_folder)}
    assert services >= {"outrider-router", "outrider-front", "outrider-target", "outrider-draft"}
    assert files_with(log_folder, PROMPT.encode()) == []

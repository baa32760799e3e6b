"""The engine's spans, from a host that runs real steps."""

import asyncio
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support.local_engine import char_detokenizers, request

from outrider.core.dispatch import EngineHello, SequenceEnd, SequenceSubmit
from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.target.builder import build_host
from outrider.target.config import TargetConfig
from outrider.telemetry.sequence_spans import SequenceTracer
from outrider.telemetry.tracing import STEP_SPAN, TracingConfig, tracer_provider

HELLO = EngineHello(engine_id="e1", engine_epoch=1, model="scripted", max_model_len=4096, kv_capacity_tokens=8192)
TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

pytestmark = pytest.mark.timeout(60)


async def run(*requests: SequenceRequest) -> InMemorySpanExporter:
    """All of them on one engine, to their ends."""
    exporter = InMemorySpanExporter()
    provider = tracer_provider(TracingConfig(service_name="t", instance_id="i"), exporter=exporter)
    host = build_host(
        engine=ScriptedEngine(ScriptedConfig(vocab_size=26, max_model_len=4096, num_blocks=2048)),
        hello=HELLO,
        config=TargetConfig(prompt_lookup_max=3),
        gate_settings=GateSettings(),
        num_valid_ids=26,
        detokenizers=char_detokenizers,
        transport=None,
        on_failure=lambda cause: None,
        spans=SequenceTracer(provider, engine_id="e1", step_interval=4),
    )
    host.start()
    session = host.connect("r")
    try:
        session.send([SequenceSubmit(stream_key=key, request=one) for key, one in enumerate(requests)])
        ended = 0
        async with asyncio.timeout(30):
            while ended < len(requests):
                ended += sum(isinstance(one, SequenceEnd) for one in await session.receive())
    finally:
        session.close()
        host.stop(10)
        provider.shutdown()
    return exporter


async def test_a_traced_sequence_has_its_stages_and_some_of_its_rounds() -> None:
    exporter = await run(replace(request(max_tokens=20), traceparent=TRACED))
    spans = exporter.get_finished_spans()
    names = [one.name for one in spans]
    assert names.count("outrider.engine.sequence") == 1
    assert {"prefill", "decode", STEP_SPAN, "round"} <= set(names)
    (step, *_) = [one for one in spans if one.name == STEP_SPAN]
    assert step.attributes is not None
    phases = {"plan", "wait", "forward", "verify", "commit", "emit"}
    assert phases <= {name.removeprefix("outrider.step.").removesuffix("_s") for name in step.attributes}
    # One step in four, of at most twenty.
    assert 1 <= names.count(STEP_SPAN) <= 5


async def test_an_unsampled_sequence_beside_it_leaves_nothing() -> None:
    unsampled = replace(request(max_tokens=8), traceparent=TRACED[:-2] + "00")
    assert (await run(unsampled)).get_finished_spans() == ()


async def test_a_sequence_that_is_refused_ends_its_span_too() -> None:
    exporter = await run(replace(request(max_tokens=5000), traceparent=TRACED))
    (span,) = [one for one in exporter.get_finished_spans() if one.name == "outrider.engine.sequence"]
    assert span.attributes is not None
    assert span.attributes["error.type"] == "invalid"

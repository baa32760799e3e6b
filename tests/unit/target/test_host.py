"""The engine in its own thread: sessions, failures, and nothing left behind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from tests.support.local_engine import LocalEngine, char_detokenizers, request

from outrider.core.dispatch import (
    EngineEvent,
    EngineHello,
    EngineReport,
    ReportRequest,
    SequenceAbort,
    SequenceDelta,
    SequenceEnd,
    SequenceErrorCode,
    SequenceSubmit,
    UpdateGate,
)
from outrider.core.errors import EngineUnavailable, Overloaded
from outrider.core.load import EngineLoad
from outrider.core.policy import GateSettings
from outrider.core.ports import EngineSession
from outrider.core.sequence import FinishReason
from outrider.core.speculation import SpeculationPreference, SpeculationReason
from outrider.engine.base import ForwardBatch
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.target.builder import build_host
from outrider.target.config import TargetConfig
from outrider.target.host import EngineHost

HELLO = EngineHello(engine_id="e1", engine_epoch=1, model="scripted", max_model_len=4096, kv_capacity_tokens=8192)
TARGET = ScriptedConfig(vocab_size=26, max_model_len=4096, num_blocks=2048)


class BreakableEngine(ScriptedEngine):
    """Fails from a chosen forward on."""

    error: Exception | None = None

    def forward(self, batch: ForwardBatch):  # type: ignore[no-untyped-def]
        if self.error is not None:
            raise self.error
        return super().forward(batch)


@pytest.fixture
async def make_host() -> AsyncIterator[Callable[..., tuple[EngineHost, BreakableEngine, list[str]]]]:
    hosts: list[EngineHost] = []

    def make(
        config: TargetConfig | None = None, *, start: bool = True
    ) -> tuple[EngineHost, BreakableEngine, list[str]]:
        engine, failures = BreakableEngine(TARGET), list[str]()
        host = build_host(
            engine=engine,
            hello=HELLO,
            config=config or TargetConfig(prompt_lookup_max=3),
            gate_settings=GateSettings(),
            num_valid_ids=26,
            detokenizers=char_detokenizers,
            transport=None,
            on_failure=failures.append,
        )
        if start:
            host.start()
        hosts.append(host)
        return host, engine, failures

    yield make
    for host in hosts:
        host.stop(timeout_s=10)


async def until_ends(session: EngineSession, count: int) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while sum(isinstance(one, SequenceEnd) for one in events) < count:
        events += await session.receive()
    return events


def text_of(events: list[EngineEvent], stream_key: int) -> list[int]:
    deltas = [one for one in events if isinstance(one, SequenceDelta) and one.stream_key == stream_key]
    return [token for one in deltas for token in one.token_ids]


async def test_two_routers_share_an_engine(make_host) -> None:  # type: ignore[no-untyped-def]
    host, _, _ = make_host()
    sessions = [host.connect("a"), host.connect("b")]
    (alone,) = LocalEngine(target=TARGET).run(request(max_tokens=50))
    for session in sessions:
        session.send([SequenceSubmit(stream_key=1, request=request(max_tokens=50))])
    for session in sessions:
        assert text_of(await until_ends(session, 1), 1) == alone.token_ids


async def test_abort_ends_one_stream(make_host) -> None:  # type: ignore[no-untyped-def]
    host, _, _ = make_host()
    session = host.connect("a")
    session.send([SequenceSubmit(stream_key=key, request=request(max_tokens=3000)) for key in (1, 2)])
    await session.receive()
    session.send([SequenceAbort(stream_key=1), SequenceAbort(stream_key=99)])
    (end,) = [one for one in await until_ends(session, 1) if isinstance(one, SequenceEnd)]
    assert end.stream_key == 1
    assert end.finish is not None
    assert end.finish.reason is FinishReason.ABORTED
    session.send([SequenceAbort(stream_key=2)])
    await until_ends(session, 1)


async def test_router_that_leaves_frees_its_sequences(make_host) -> None:  # type: ignore[no-untyped-def]
    host, _, _ = make_host()
    leaver, stayer = host.connect("a"), host.connect("b")
    leaver.send([SequenceSubmit(stream_key=1, request=request(max_tokens=3000))])
    await leaver.receive()
    leaver.close()
    stayer.send([ReportRequest(nonce=5)])
    (report,) = await stayer.receive()
    assert isinstance(report, EngineReport)
    assert (report.nonce, report.status.running, report.status.kv_usage) == (5, 0, 0.0)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(EngineUnavailable("rank 1 is gone"), "rank 1 is gone"), (RuntimeError("secret path"), "RuntimeError")],
)
async def test_engine_failure_reaches_every_stream_by_name(make_host, error: Exception, cause: str) -> None:  # type: ignore[no-untyped-def]
    host, engine, failures = make_host()
    session = host.connect("a")
    session.send([SequenceSubmit(stream_key=key, request=request(max_tokens=3000)) for key in (1, 2)])
    await session.receive()
    engine.error = error
    ends = [one for one in await until_ends(session, 2) if isinstance(one, SequenceEnd)]
    for end in ends:
        assert end.failure is not None
        assert end.failure.code is SequenceErrorCode.UNAVAILABLE
        assert cause in end.failure.message
        assert "secret" not in end.failure.message
    with pytest.raises(EngineUnavailable, match=cause):
        await session.receive()
    with pytest.raises(EngineUnavailable, match=cause):
        session.send([ReportRequest(nonce=1)])
    with pytest.raises(EngineUnavailable, match=cause):
        host.connect("b")
    host.stop(timeout_s=10)
    assert len(failures) == 1
    assert host.failure is not None


async def test_a_failed_engine_leaves_its_draft_whatever_else_is_broken(make_host, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    host, engine, failures = make_host()
    closed: list[bool] = []

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("nothing can be ended")

    monkeypatch.setattr(host._loop, "end", broken)
    monkeypatch.setattr(host._loop.proposers, "close", lambda: closed.append(True))
    session = host.connect("a")
    engine.error = EngineUnavailable("rank 1 is gone")
    session.send([SequenceSubmit(stream_key=1, request=request(max_tokens=3000))])
    with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
        await session.receive()
    host.stop(timeout_s=10)
    assert (failures, closed) == (["rank 1 is gone"], [True])


async def test_full_waiting_line_refuses_and_others_go_on(make_host) -> None:  # type: ignore[no-untyped-def]
    host, _, _ = make_host(TargetConfig(max_num_seqs=1, max_waiting_seqs=1))
    session = host.connect("a")
    session.send([SequenceSubmit(stream_key=key, request=request(max_tokens=200)) for key in (1, 2, 3, 4)])
    ends = {one.stream_key: one for one in await until_ends(session, 4) if isinstance(one, SequenceEnd)}
    refused = [key for key, end in ends.items() if end.failure is not None]
    assert refused
    codes = {end.failure.code for end in ends.values() if end.failure is not None}
    assert codes == {SequenceErrorCode.OVERLOADED}
    assert ends[1].finish is not None


async def test_gate_settings_are_live(make_host) -> None:  # type: ignore[no-untyped-def]
    host, _, _ = make_host()
    session = host.connect("a")
    session.send([UpdateGate(settings=GateSettings(preference=SpeculationPreference.OFF)), ReportRequest(nonce=1)])
    (report,) = await session.receive()
    assert report.status.reason is SpeculationReason.OPERATOR_OFF


async def test_heartbeat_moves_while_idle(make_host) -> None:  # type: ignore[no-untyped-def]
    host, _, _ = make_host()
    session = host.connect("a")
    beats = []
    for nonce in range(3):
        session.send([ReportRequest(nonce=nonce)])
        await session.receive()
        beats.append(host.heartbeat)
    assert beats[0] < beats[2]


async def test_hops_are_taken_once(make_host) -> None:  # type: ignore[no-untyped-def]
    host, _, _ = make_host()
    host._loop.counters.proposers.hops_s.extend([0.001, 0.002])
    assert host.take_hops() == [0.001, 0.002]
    assert host.take_hops() == []


async def test_a_full_queue_takes_all_of_a_message_or_nothing(make_host) -> None:  # type: ignore[no-untyped-def]
    """Half of it would run twice: the sender tries again what was refused."""
    host, _, _ = make_host(start=False)
    session = host.connect("a")
    session.send([ReportRequest(nonce=1)] * 8190)  # leaves room for two
    with pytest.raises(Overloaded):
        session.send([SequenceSubmit(stream_key=key, request=request(max_tokens=3)) for key in (1, 2, 3)])
    session.send([ReportRequest(nonce=2)])
    host.start()
    events: list[EngineEvent] = []
    while not any(isinstance(one, EngineReport) and one.nonce == 2 for one in events):
        events += await session.receive()
    assert {type(one) for one in events} == {EngineReport}
    session.send([SequenceSubmit(stream_key=4, request=request(max_tokens=3))])
    assert {one.stream_key for one in await until_ends(session, 1) if isinstance(one, SequenceDelta)} == {4}


async def test_a_leaving_engine_says_so_at_once_and_finishes_what_it_has(
    make_host: Callable[..., tuple[EngineHost, BreakableEngine, list[str]]],
) -> None:
    host, _, _ = make_host()
    session, drained = host.connect("r1"), threading.Event()
    session.send([SequenceSubmit(stream_key=1, request=request(max_tokens=400))])
    await session.receive()
    host.drain(drained.set)
    events = await until_ends(session, 1)
    (report,) = [one for one in events if isinstance(one, EngineReport)]
    assert not report.status.ready
    assert "leaving" in report.status.problem
    assert [one.finish.reason for one in events if isinstance(one, SequenceEnd) and one.finish] == [FinishReason.LENGTH]
    assert await asyncio.to_thread(drained.wait, 20)
    assert not host.status.ready


async def test_what_was_sent_before_the_router_heard_of_it_runs_too(
    make_host: Callable[..., tuple[EngineHost, BreakableEngine, list[str]]],
) -> None:
    host, _, _ = make_host(start=False)
    session, drained = host.connect("r1"), threading.Event()
    host.drain(drained.set)
    host.drain(lambda: pytest.fail("the first call counts"))
    session.send([SequenceSubmit(stream_key=1, request=request(max_tokens=4))])
    host.start()
    (end,) = [one for one in await until_ends(session, 1) if isinstance(one, SequenceEnd)]
    assert end.failure is None
    assert await asyncio.to_thread(drained.wait, 20)


def test_the_load_counts_seats_kv_and_the_longest_wait() -> None:
    engine = LocalEngine(config=TargetConfig(max_num_seqs=2))
    for _ in range(3):
        engine.submit(request(max_tokens=50))
    engine.step()
    engine.clock.advance(2.5)
    load = engine.loop.load()
    assert (load.running, load.waiting, load.idle) == (2, 1, False)
    assert load.kv_usage > 0
    assert load.queue_s == pytest.approx(2.5)
    while engine.loop.scheduler.has_work:
        engine.step()
    assert engine.loop.load() == EngineLoad()

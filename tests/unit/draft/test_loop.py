"""The thread: links through real queues, and what happens when it ends."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.unit.draft.bench import Bench, Peer, hello

from outrider.core.errors import CompatibilityError, EngineUnavailable, ProtocolError
from outrider.core.link import (
    DraftEvent,
    DraftProposal,
    Drain,
    Goodbye,
    OpenAck,
    Ping,
    Pong,
    Verdicts,
)
from outrider.core.ports import DraftService, DraftSession
from outrider.draft.loop import DraftLoop
from outrider.engine.base import ForwardBatch

PROMPT = [5, 7, 11, 2, 9, 30, 41]
LIMIT_S = 20.0


@contextmanager
def running(bench: Bench) -> Iterator[DraftLoop]:
    loop = DraftLoop(drafter=bench.drafter, config=bench.config)
    loop.start()
    try:
        yield loop
    finally:
        assert loop.stop(LIMIT_S)


async def receive_until(session: DraftSession, done: Callable[[list[DraftEvent]], bool]) -> list[DraftEvent]:
    """Everything received until `done` says so, or the session ends."""
    events: list[DraftEvent] = []
    async with asyncio.timeout(LIMIT_S):
        while not done(events):
            more = await session.receive()
            if not more:
                break
            events += more
    return events


async def until_closed(session: DraftSession) -> list[DraftEvent]:
    return await receive_until(session, lambda events: False)


async def test_blocks_come_through_the_queues() -> None:
    bench = Bench()
    peer = Peer(bench, 0)
    with running(bench) as loop:
        service: DraftService = loop
        session = service.connect(hello())
        assert session.ack.step_ms > 0
        session.send([peer.opening(1, PROMPT)])
        assert await receive_until(session, bool) == [OpenAck(handle=1, have_len=len(PROMPT))]
        session.send([Verdicts(step=1, rows=(peer.row(1, 3, k=4),))])
        for num_accepted in (4, 2, 0, 3):
            (event,) = await receive_until(session, bool)
            assert isinstance(event, DraftProposal)
            assert list(event.proposal.token_ids) == peer.oracle(1, 4)
            row = peer.row(1, 9, k=4, judged=event.proposal, num_accepted=num_accepted)
            session.send([Verdicts(step=1, rows=(row,))])
        session.close()
        session.close()
        session.send([Ping(nonce=1)])
        assert Pong(nonce=1) not in await until_closed(session)
        other = loop.connect(hello())
        other.send([Ping(nonce=2)])
        assert await receive_until(other, bool) == [Pong(nonce=2)]
        assert bench.kv.usage == 0
    assert loop.failure is None


async def test_stopping_frees_everything() -> None:
    bench = Bench()
    with running(bench) as loop:
        session = loop.connect(hello())
        session.send([Peer(bench, 0).opening(1, PROMPT)])
        await receive_until(session, bool)
        assert bench.kv.usage > 0
    assert bench.kv.usage == 0


async def test_two_links_at_once() -> None:
    bench = Bench()
    with running(bench) as loop:
        sessions = [loop.connect(hello()) for _ in range(2)]
        peers = [Peer(bench, 0) for _ in sessions]
        for peer, session, token_id in zip(peers, sessions, (3, 4), strict=True):
            session.send([peer.opening(1, PROMPT), Verdicts(step=1, rows=(peer.row(1, token_id, k=3),))])
        for peer, session in zip(peers, sessions, strict=True):
            events = await receive_until(session, lambda events: len(events) == 2)
            proposal = events[-1]
            assert isinstance(proposal, DraftProposal)
            assert list(proposal.proposal.token_ids) == peer.oracle(1, 3)


async def test_goodbye_ends_the_session() -> None:
    bench = Bench()
    with running(bench) as loop:
        session = loop.connect(hello())
        session.send([Peer(bench, 0).opening(1, PROMPT)])
        await receive_until(session, bool)
        session.send([Ping(nonce=3), Goodbye(reason="the engine is rebuilt")])
        await until_closed(session)
    assert bench.kv.usage == 0
    assert loop.failure is None


async def test_drain_reaches_every_target() -> None:
    with running(Bench()) as loop:
        sessions = [loop.connect(hello()) for _ in range(2)]
        loop.drain("scaling down")
        for session in sessions:
            assert await receive_until(session, bool) == [Drain(reason="scaling down")]


async def test_a_failed_batch_is_visible_and_ends_every_session_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    with running(bench) as loop:
        sessions = [loop.connect(hello()) for _ in range(2)]

        def broken(batch: ForwardBatch) -> None:
            raise EngineUnavailable("the device is lost")

        monkeypatch.setattr(bench.engine, "forward", broken)
        sessions[0].send([Peer(bench, 0).opening(1, PROMPT)])
        for session in sessions:
            assert await until_closed(session) == [
                Drain(reason="the draft failed: engine unavailable: the device is lost")
            ]
        assert isinstance(loop.failure, EngineUnavailable)
        with pytest.raises(EngineUnavailable, match="the device is lost"):
            loop.connect(hello())
        sessions[0].send([Ping(nonce=1)])
    assert "the drafting thread failed" in caplog.text


async def test_stopping_ends_every_session() -> None:
    with running(Bench()) as loop:
        session = loop.connect(hello())
        assert loop.stop(LIMIT_S)
        assert await until_closed(session) == [Drain(reason="the draft has stopped")]
        with pytest.raises(EngineUnavailable, match="stopped"):
            loop.connect(hello())


async def test_other_vocabularies_are_refused_at_once() -> None:
    with running(Bench()) as loop, pytest.raises(CompatibilityError):
        loop.connect(hello(tokenizer_fingerprint=b"other"))


class Gate:
    """Holds the drafting thread inside a forward."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        forward = bench.engine.forward

        def held(batch: ForwardBatch) -> object:
            self.entered.set()
            assert self.open.wait(LIMIT_S)
            return forward(batch)

        monkeypatch.setattr(bench.engine, "forward", held)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, LIMIT_S)


async def test_a_swamped_draft_refuses_and_still_notices_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(inbox_limit=4)
    with running(bench) as loop:
        gate = Gate(bench, monkeypatch)
        session, leaving = loop.connect(hello()), loop.connect(hello())
        session.send([Peer(bench, 0).opening(1, PROMPT)])
        await gate.wait_entered()
        for nonce in range(4):
            session.send([Ping(nonce=nonce)])
        with pytest.raises(ProtocolError, match="swamped"):
            session.send([Ping(nonce=4)])
        leaving.close()
        gate.open.set()
        events = await receive_until(session, lambda events: len(events) >= 5)
        assert {one.nonce for one in events if isinstance(one, Pong)} == {0, 1, 2, 3}
        assert await until_closed(leaving) == []


async def test_a_target_that_reads_no_more_is_disconnected() -> None:
    bench = Bench(outbox_limit=3)
    with running(bench) as loop:
        deaf, other = loop.connect(hello()), loop.connect(hello())
        for nonce in range(4):
            deaf.send([Ping(nonce=nonce)])
        other.send([Ping(nonce=9)])
        assert await receive_until(other, bool) == [Pong(nonce=9)]
        events = await until_closed(deaf)
        assert events == [Pong(nonce=nonce) for nonce in range(len(events))]
        assert len(events) < 4


async def test_verdicts_during_a_round_supersede_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    peer = Peer(bench, 0)
    with running(bench) as loop:
        session = loop.connect(hello())
        session.send([peer.opening(1, PROMPT)])
        await receive_until(session, bool)
        gate = Gate(bench, monkeypatch)
        session.send([Verdicts(step=1, rows=(peer.row(1, 3, k=8),))])
        await gate.wait_entered()
        session.send([Verdicts(step=2, rows=(peer.row(1, 4, k=2),))])
        gate.open.set()
        (event,) = await receive_until(session, bool)
        assert isinstance(event, DraftProposal)
        assert list(event.proposal.token_ids) == peer.oracle(1, 2)
    assert bench.drafter.counters.superseded == 1


def test_a_thread_that_is_stopped_before_it_starts_ends_at_once() -> None:
    bench = Bench()
    loop = DraftLoop(drafter=bench.drafter, config=bench.config)
    assert loop.stop(0.0)
    loop.start()
    assert loop.stop(LIMIT_S)

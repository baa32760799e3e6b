"""Small parts: back-off, inbox, caller, groups, folding a stream, joining attempts, options."""

from collections.abc import AsyncIterator, Sequence
from random import Random

import pytest

from outrider.core.caller import anonymous, caller_of
from outrider.core.dispatch import SpeculationOutcome, Timings
from outrider.core.errors import ConfigError, ProtocolError
from outrider.core.generation import (
    Caller,
    ChoiceEnd,
    GenerationAccepted,
    GenerationEvent,
    GenerationRequest,
    TextDelta,
    Usage,
)
from outrider.core.link import HelloAck, LinkDown, LinkUp, Pong
from outrider.core.mailbox import AsyncMailbox
from outrider.core.result import collect
from outrider.core.sequence import Finish, FinishReason
from outrider.rpc.backoff import Backoff, BackoffOptions
from outrider.rpc.channel_options import Keepalive
from outrider.rpc.client import ClientOptions
from outrider.rpc.link_client import LinkOptions
from outrider.rpc.link_inbox import LinkInbox, Outbox
from outrider.rpc.link_stream import StreamOptions
from outrider.rpc.message_groups import MAX_GROUP_BYTES, in_groups
from outrider.rpc.resumption import Resumption
from outrider.rpc.server import ServerOptions
from outrider.v1 import speculation_pb2

ACK = HelloAck(
    incarnation=1,
    draft_model="",
    vocab_size=1,
    tokenizer_fingerprint=b"",
    max_model_len=1,
    kv_capacity_tokens=1,
    step_ms=1.0,
    capabilities=frozenset(),
)


def test_backoff_grows_to_its_limit_and_a_stable_link_clears_it() -> None:
    backoff = Backoff(BackoffOptions(initial_s=1, multiplier=2, max_s=5, jitter=0, stable_s=10), Random(0))
    assert [backoff.after_loss(0) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert backoff.after_loss(9) == 5
    assert backoff.after_loss(10) == 1


def test_backoff_jitter_only_shortens() -> None:
    backoff = Backoff(BackoffOptions(initial_s=1, max_s=1, jitter=0.5, refused_s=30), Random(0))
    delays = [backoff.after_loss(0) for _ in range(50)]
    assert len(set(delays)) > 40
    assert all(0.5 <= delay <= 1 for delay in delays)
    assert 15 <= backoff.after_refusal() <= 30


@pytest.mark.parametrize(
    "options",
    [{"initial_s": 0}, {"max_s": -1}, {"refused_s": 0}, {"stable_s": 0}, {"multiplier": 0.5}, {"jitter": 2}],
)
def test_backoff_options_name_what_is_wrong(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        BackoffOptions(**options)


def test_other_options_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="time_s"):
        Keepalive(time_s=0)
    with pytest.raises(ConfigError, match="hello_timeout_s"):
        StreamOptions(hello_timeout_s=0)
    with pytest.raises(ConfigError, match="queue_messages"):
        LinkOptions(queue_messages=0)
    with pytest.raises(ConfigError, match="inbox_messages"):
        LinkOptions(inbox_messages=1)
    with pytest.raises(ConfigError, match="port"):
        ServerOptions(port=70_000)
    with pytest.raises(ConfigError, match="grace_s"):
        ServerOptions(grace_s=-1)
    with pytest.raises(ConfigError, match="call_timeout_s"):
        ClientOptions(call_timeout_s=0)
    with pytest.raises(ConfigError, match="max_resumes"):
        ClientOptions(max_resumes=-1)


def up(link_id: int) -> tuple[LinkUp, Outbox]:
    return LinkUp(link_id=link_id, address="a", hello=ACK), AsyncMailbox(8)


async def test_the_engine_sends_on_the_link_that_it_knows() -> None:
    inbox = LinkInbox(16)
    first, first_box = up(1)
    second, second_box = up(2)
    known = [inbox.outbox]
    inbox.up(first, first_box)
    known.append(inbox.outbox)
    assert inbox.take(0) == [first]
    known.append(inbox.outbox)
    inbox.down(LinkDown(link_id=1, cause="lost"))
    inbox.up(second, second_box)
    known.append(inbox.outbox)  # not taken yet: a message for link 1 cannot reach link 2
    assert inbox.take(0) == [LinkDown(link_id=1, cause="lost"), second]
    known.append(inbox.outbox)
    assert known == [None, None, first_box, first_box, second_box]


async def test_changes_of_state_find_room_in_a_full_inbox() -> None:
    inbox = LinkInbox(4)
    inbox.up(*up(1))
    assert [inbox.events([Pong(nonce=nonce)]) for nonce in range(5)] == [True, True, True, False, False]
    assert len(inbox.take(0)) == 4
    while inbox.events([Pong(nonce=0)]):
        pass
    inbox.down(LinkDown(link_id=1, cause="lost"))
    for link_id in range(2, 9):
        inbox.up(*up(link_id))
        while inbox.events([Pong(nonce=link_id)]):
            pass
        inbox.down(LinkDown(link_id=link_id, cause="again"))
    inbox.up(*up(9))
    states = [event for event in inbox.take(0) if isinstance(event, LinkUp | LinkDown)]
    assert isinstance(states[0], LinkDown)
    assert isinstance(states[-1], LinkUp)
    assert (states[0].link_id, states[-1].link_id) == (1, 9)


def test_an_inbox_that_is_closed_takes_nothing() -> None:
    inbox = LinkInbox(4)
    inbox.close()
    inbox.down(LinkDown(link_id=1, cause="lost"))
    assert inbox.take(10) == []


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        (None, ""),
        ([], ""),
        ([("authorization", "Bearer k1")], "k1"),
        ([("Authorization", "bearer  k1 ")], "k1"),
        ([("authorization", "Basic k1")], ""),
        ([("x-api-key", "k2")], "k2"),
        ([("authorization", "Bearer k1"), ("x-api-key", "k2")], "k1"),
        ([("x-api-key", b"k3")], "k3"),
    ],
)
def test_caller(metadata: Sequence[tuple[str, str | bytes]] | None, key: str) -> None:
    assert caller_of(metadata, lambda given: f"id of {given}").key_id == f"id of {key}"
    assert caller_of(metadata, anonymous) == Caller()


def test_trace_context() -> None:
    assert caller_of([("traceparent", "00-1-2-01")], anonymous).traceparent == "00-1-2-01"


def test_groups() -> None:
    half = speculation_pb2.Goodbye(reason="x" * (MAX_GROUP_BYTES // 2 - 16))
    large = speculation_pb2.Goodbye(reason="x" * (2 * MAX_GROUP_BYTES))
    assert [len(group) for group in in_groups([half, half, half, large, half])] == [2, 1, 1, 1]
    assert list(in_groups([])) == []


def accepted(request_id: str = "r", seed: int = 5) -> GenerationAccepted:
    return GenerationAccepted(request_id=request_id, model="m", seed=seed, prompt_tokens=3)


def delta(first: int, *ids: int, choice: int = 0) -> TextDelta:
    return TextDelta(
        choice_index=choice, first_token_index=first, text="".join(f"<{one}>" for one in ids), token_ids=ids, seed=5
    )


def end(completion_tokens: int, choice: int = 0) -> ChoiceEnd:
    return ChoiceEnd(
        choice_index=choice,
        finish=Finish(reason=FinishReason.LENGTH),
        stop_string=None,
        usage=Usage(prompt_tokens=3, completion_tokens=completion_tokens, cached_prompt_tokens=1),
        timings=Timings(),
        speculation=SpeculationOutcome(),
    )


async def played(*events: GenerationEvent) -> AsyncIterator[GenerationEvent]:
    for event in events:
        yield event


async def test_a_stream_folds_by_choice() -> None:
    result = await collect(
        played(accepted(), delta(0, 1, choice=1), delta(0, 2), delta(1, 3, choice=1), end(2, choice=1), end(1))
    )
    assert [choice.text for choice in result.choices] == ["<2>", "<1><3>"]
    assert result.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_prompt_tokens=1)


@pytest.mark.parametrize(
    "events", [(), (accepted(),), (delta(0, 1), end(1)), (accepted(), delta(0, 1, choice=1), end(1))]
)
async def test_a_stream_that_stops_short_is_no_result(events: tuple[GenerationEvent, ...]) -> None:
    with pytest.raises(ProtocolError):
        await collect(played(*events))


def test_attempts_join_into_one_stream() -> None:
    resumption = Resumption(GenerationRequest(text="hi", resume_token_ids=(9,)))
    assert resumption.next_attempt() == GenerationRequest(text="hi", resume_token_ids=(9,))
    assert resumption.see(accepted()) == accepted()
    assert resumption.see(delta(1, 1, 2)) == delta(1, 1, 2)
    second = resumption.next_attempt()
    assert second.resume_token_ids == (9, 1, 2)
    assert (second.seed, second.request_id) == (5, "r")
    assert resumption.see(accepted(seed=5)) is None
    with pytest.raises(ProtocolError, match="first_token_index: 4 where 3 is next"):
        resumption.see(delta(4, 3))
    resumption.see(delta(3, 3))
    whole = resumption.see(end(1))
    assert isinstance(whole, ChoiceEnd)
    assert whole.usage.completion_tokens == 3


def test_an_attempt_that_was_not_admitted_is_repeated_as_it_is() -> None:
    request = GenerationRequest(text="hi")
    resumption = Resumption(request)
    resumption.next_attempt()
    assert resumption.next_attempt() is request
    assert not resumption.started

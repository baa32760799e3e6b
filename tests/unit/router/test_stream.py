"""One choice: deltas, ends and failures."""

import pytest
from tests.unit.router.byte_codec import ByteCodec, ids
from tests.unit.router.fakes import LIMITS, STOP

from outrider.core.dispatch import (
    SequenceDelta,
    SequenceEnd,
    SequenceErrorCode,
    SequenceFailure,
    SpeculationOutcome,
    Timings,
)
from outrider.core.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    OutriderError,
    Overloaded,
)
from outrider.core.generation import ChoiceEnd, GenerationRequest, TextDelta, Usage
from outrider.core.sequence import Finish, FinishReason
from outrider.core.speculation import SpeculationMode, SpeculationReason, SpeculationStats
from outrider.core.verdict import TokenLogprobs
from outrider.router.stream import ChoiceStream, failure_error
from outrider.router.validation import plan_request, resume_text


def stream(resume: str = "", *, stop: tuple[str, ...] = (), include: bool = False, index: int = 0) -> ChoiceStream:
    request = GenerationRequest(text="hi", seed=9, resume_token_ids=ids(resume), stop=stop, include_stop_str=include)
    plan = plan_request(request, ids("hi"), LIMITS, ByteCodec())
    return ChoiceStream(index, plan, resume_text(plan, ByteCodec()))


def delta(at: int, text: str) -> SequenceDelta:
    return SequenceDelta(stream_key=1, first_token_index=at, token_ids=ids(text))


def end(stop_string_index: int | None = None) -> SequenceEnd:
    return SequenceEnd(stream_key=1, finish=Finish(reason=FinishReason.STOP, stop_string_index=stop_string_index))


def test_delta_carries_tokens_text_logprobs_and_seed() -> None:
    logprobs = (TokenLogprobs(logprob=-0.5, top=((97, -0.5),)),)
    source = SequenceDelta(stream_key=1, first_token_index=0, token_ids=ids("a"), logprobs=logprobs)
    assert stream(index=3).feed(source) == TextDelta(
        choice_index=3, first_token_index=0, text="a", token_ids=ids("a"), logprobs=logprobs, seed=9
    )


def test_ids_are_kept_up_to_the_token_that_completes_the_stop_string() -> None:
    one = stream(stop=("END",))
    made = one.feed(delta(0, "abEND"))
    assert (made.text, made.token_ids) == ("ab", ids("abEND"))
    (last,) = one.finish(end(0))
    assert isinstance(last, ChoiceEnd)
    assert last.stop_string == "END"
    assert last.usage.completion_tokens == 5


def test_included_stop_string_comes_in_a_last_delta_without_tokens() -> None:
    one = stream(stop=("END",), include=True)
    assert one.feed(delta(0, "abEND")).text == "ab"
    rest, last = one.finish(end(0))
    assert rest == TextDelta(choice_index=0, first_token_index=5, text="END", token_ids=(), seed=9)
    assert isinstance(last, ChoiceEnd)


def test_resumed_stop_string_straddles_the_boundary() -> None:
    one = stream("aEN", stop=("END",))
    assert one.feed(delta(3, "D")).text == ""
    (last,) = one.finish(end(0))
    assert isinstance(last, ChoiceEnd)
    assert last.usage.completion_tokens == 1


def test_held_back_text_of_the_broken_stream_is_shown_after_resumption() -> None:
    assert stream("aEN", stop=("END",)).feed(delta(3, "x")).text == "ENx"


def test_resumed_half_character_is_completed() -> None:
    request = GenerationRequest(text="hi", resume_token_ids=ids("é")[:1])
    plan = plan_request(request, ids("hi"), LIMITS, ByteCodec())
    one = ChoiceStream(0, plan, resume_text(plan, ByteCodec()))
    made = one.feed(SequenceDelta(stream_key=1, first_token_index=1, token_ids=ids("é")[1:]))
    assert made.text == "é"


def test_end_reports_what_the_engine_measured() -> None:
    one = stream("ab")
    one.feed(delta(2, "cd"))
    timings = Timings(queue_s=0.1, prefill_s=0.2, first_token_s=0.3, total_s=0.4)
    outcome = SpeculationOutcome(
        mode=SpeculationMode.CACHED, reason=SpeculationReason.ON, stats=SpeculationStats(rounds=1, accepted=1)
    )
    source = SequenceEnd(stream_key=1, finish=STOP, cached_prompt_tokens=1, timings=timings, speculation=outcome)
    assert one.finish(source) == [
        ChoiceEnd(
            choice_index=0,
            finish=STOP,
            stop_string=None,
            usage=Usage(prompt_tokens=2, completion_tokens=2, cached_prompt_tokens=1),
            timings=timings,
            speculation=outcome,
        )
    ]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_hole_or_repetition_in_the_output_is_no_text(at: int) -> None:
    one = stream()
    one.feed(delta(0, "ab"))
    with pytest.raises(EngineUnavailable, match=f"output token {at}, 2 was next"):
        one.feed(delta(at, "x"))


def test_end_without_reason_or_with_an_unknown_stop_string_is_the_engines_fault() -> None:
    with pytest.raises(EngineUnavailable, match="without a reason"):
        stream().finish(SequenceEnd(stream_key=1))
    with pytest.raises(EngineUnavailable, match="stop string 1"):
        stream(stop=("x",)).finish(end(1))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (SequenceErrorCode.INVALID, InvalidRequest),
        (SequenceErrorCode.OVERLOADED, Overloaded),
        (SequenceErrorCode.DEADLINE, DeadlineExceeded),
        (SequenceErrorCode.UNAVAILABLE, EngineUnavailable),
    ],
)
def test_failure_code_becomes_a_domain_error(code: SequenceErrorCode, error: type[OutriderError]) -> None:
    failure = SequenceFailure(code=code, message="stop: too much")
    assert type(failure_error(failure)) is error
    assert "stop: too much" in str(failure_error(failure))
    with pytest.raises(error):
        stream().finish(SequenceEnd(stream_key=1, failure=failure))


def test_every_failure_code_is_mapped() -> None:
    for code in SequenceErrorCode:
        failure_error(SequenceFailure(code=code, message="m"))


def test_invalid_failure_names_its_field() -> None:
    error = failure_error(SequenceFailure(code=SequenceErrorCode.INVALID, message="top_k: too large"))
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.problem) == ("top_k", "too large")
    nameless = failure_error(SequenceFailure(code=SequenceErrorCode.INVALID, message="no"))
    assert str(nameless) == "request: no"

"""Every field of a request against its limit: the error names both."""

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router.byte_codec import EOS, STOP_WORD, VOCAB_SIZE, ByteCodec, ids

from outrider.core.errors import ConfigError, InvalidRequest, ModelNotFound, Unsupported
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.speculation import SpeculationChoice, VerificationRule
from outrider.decoding.keys import derive_key
from outrider.router.codec import encode_prompt
from outrider.router.limits import AdmissionLimits, RouterLimits
from outrider.router.plan import RequestPlan
from outrider.router.validation import check_fields, plan_request, resume_text

LIMITS = RouterLimits(model="toy", max_model_len=64, max_num_speculative_tokens=7, max_prompt_chars=1000)
CODEC = ByteCodec()


async def plan(limits: RouterLimits = LIMITS, **fields: Any) -> RequestPlan:
    """Validate a request that continues "abc" unless `fields` say otherwise."""
    if not {"text", "messages", "token_ids"} & fields.keys():
        fields["text"] = "abc"
    request = GenerationRequest(**fields)
    check_fields(request, limits)
    made = plan_request(request, await encode_prompt(request, CODEC), limits, CODEC)
    resume_text(made, CODEC)
    return made


def said(role: str, content: str = "hi") -> dict[str, Any]:
    return {"messages": (ChatMessage(role=role, content=content),)}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"text": None}, "input", "exactly one of text, chat, token_ids"),
    ({"text": "a", "token_ids": (1,)}, "input", "text and token_ids are set"),
    ({"text": ""}, "text", "is empty"),
    ({"text": "x" * 1001}, "text", "1001 characters; the limit is 1000"),
    ({"text": "a\ud800"}, "text", "character 1 is not valid Unicode"),
    ({"token_ids": ()}, "token_ids", "is empty"),
    ({"token_ids": (1, VOCAB_SIZE)}, "token_ids", f"id {VOCAB_SIZE} at index 1 is outside the vocabulary"),
    ({"token_ids": (-1,)}, "token_ids", "id -1 at index 0"),
    ({"messages": ()}, "chat.messages", "at least 1"),
    (said("tool"), "chat.messages[0].role", "none of system, user, assistant"),
    (said("user", "refuse me"), "chat", "the template refuses"),
    (said("user", "\udfff"), "chat.messages[0].content", "not valid Unicode"),
    (said("user", "x" * 1001), "chat.messages[0].content", "the limit is 1000"),
    ({"messages": (ChatMessage(role="user", content="x" * 600),) * 2}, "chat.messages", "1200 characters"),
    ({"continue_final_message": True}, "continue_final_message", "needs chat"),
    ({"text": "x" * 64}, "text", "max_model_len 64 leaves no room for one output token"),
    ({"token_ids": (1,) * 64}, "token_ids", "max_model_len 64"),
    ({"max_tokens": 0}, "max_tokens", "0 is below 1"),
    ({"max_tokens": 62}, "max_tokens", "62 and a prompt of 3 tokens exceed max_model_len 64"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "6 is above max_tokens 5"),
    ({"min_tokens": 62}, "min_tokens", "62 is above the 61"),
    ({"min_tokens": -1}, "min_tokens", "below 0"),
    ({"temperature": -0.1}, "temperature", "[0, 100]"),
    ({"temperature": math.nan}, "temperature", "nan is outside [0, 100]"),
    ({"temperature": math.inf}, "temperature", "inf is outside [0, 100]"),
    ({"top_p": 0.0}, "top_p", "(0, 1]"),
    ({"top_p": 1.1}, "top_p", "(0, 1]"),
    ({"top_p": math.nan}, "top_p", "(0, 1]"),
    ({"top_k": -1}, "top_k", "below 0"),
    ({"top_k": 2**32}, "top_k", "above 4294967295"),
    ({"min_p": 1.5}, "min_p", "[0, 1]"),
    ({"min_p": math.nan}, "min_p", "[0, 1]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "(0, 10]"),
    ({"repetition_penalty": math.inf}, "repetition_penalty", "(0, 10]"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "[-2, 2]"),
    ({"frequency_penalty": math.nan}, "frequency_penalty", "[-2, 2]"),
    ({"presence_penalty": -2.5}, "presence_penalty", "[-2, 2]"),
    ({"presence_penalty": -math.inf}, "presence_penalty", "[-2, 2]"),
    ({"logit_bias": ((1, 101.0),)}, "logit_bias[1]", "[-100, 100]"),
    ({"logit_bias": ((1, math.nan),)}, "logit_bias[1]", "[-100, 100]"),
    ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias", "twice"),
    ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "logit_bias", "1025 entries; the limit is 1024"),
    ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias", f"[0, {VOCAB_SIZE - 1}]"),
    ({"stop": ("x",) * 17}, "stop", "17 strings; the limit is 16"),
    ({"stop": ("x", "")}, "stop[1]", "is empty"),
    ({"stop": ("x" * 257,)}, "stop[0]", "257 characters; the limit is 256"),
    ({"stop": ("\ud800",)}, "stop[0]", "not valid Unicode"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids", "65 ids; the limit is 64"),
    ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids", f"[0, {VOCAB_SIZE - 1}]"),
    ({"seed": -1}, "seed", f"[0, {2**64 - 1}]"),
    ({"seed": 2**64}, "seed", f"[0, {2**64 - 1}]"),
    ({"n": 0}, "n", "[1, 16]"),
    ({"n": 17}, "n", "[1, 16]"),
    ({"n": 2, "resume_token_ids": (1,)}, "n", "resume_token_ids"),
    ({"top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    ({"top_logprobs": -1}, "top_logprobs", "[0, 20]"),
    ({"request_id": "x" * 129}, "request_id", "129 characters; the limit is 128"),
    ({"request_id": "a\nb"}, "request_id", "not printable"),
    ({"traffic_class": "x" * 65}, "traffic_class", "65 characters; the limit is 64"),
    ({"traffic_class": "\x00"}, "traffic_class", "not printable"),
    ({"priority": 101}, "priority", "[-100, 100]"),
    ({"priority": -101}, "priority", "[-100, 100]"),
    ({"timeout_ms": 0}, "timeout_ms", "[1, 3600000]"),
    ({"timeout_ms": -5}, "timeout_ms", "[1, 3600000]"),
    ({"timeout_ms": 3_600_001}, "timeout_ms", "[1, 3600000]"),
    ({"speculation": SpeculationChoice(max_tokens=8)}, "speculation.max_tokens", "8 is outside [0, 7]"),
    ({"resume_token_ids": (1, 2), "max_tokens": 2}, "resume_token_ids", "max_tokens is 2"),
    ({"resume_token_ids": (VOCAB_SIZE,)}, "resume_token_ids", f"[0, {VOCAB_SIZE - 1}]"),
    ({"resume_token_ids": (1, EOS, 2)}, "resume_token_ids", f"end-of-text token {EOS} at index 1"),
    ({"resume_token_ids": (1, 5), "stop_token_ids": (5,)}, "resume_token_ids", "stop token 5 at index 1"),
    ({"resume_token_ids": ids("an END"), "stop": ("END",)}, "resume_token_ids", "stop string 'END'"),
    ({"resume_token_ids": (STOP_WORD,), "stop": ("STOP",)}, "resume_token_ids", "stop string 'STOP'"),
]


@pytest.mark.parametrize(("fields", "field", "limit"), BAD, ids=[f"{at}-{one[1]}" for at, one in enumerate(BAD)])
async def test_bad_field_is_refused_by_name_with_its_limit(fields: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await plan(**fields)
    assert caught.value.field == field
    assert limit in caught.value.problem
    assert not isinstance(caught.value, Unsupported)


@pytest.mark.parametrize("name", ["json_schema", "regex", "grammar"])
async def test_constraints_are_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported) as caught:
        await plan(constraint=name)
    assert caught.value.field == name


async def test_adapter_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="adapter: 'mine' is not served"):
        await plan(adapter="mine")


async def test_rule_that_no_engine_offers_is_refused() -> None:
    limits = replace(LIMITS, verification_rules=(VerificationRule.COUPLED,))
    wish = SpeculationChoice(rule=VerificationRule.REJECTION)
    assert (await plan(speculation=wish)).speculation == wish
    with pytest.raises(Unsupported, match=r"speculation\.rule: REJECTION is not offered here; offered: COUPLED"):
        await plan(limits, speculation=wish)


async def test_other_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="'other' is not served here; this deployment serves 'toy'"):
        await plan(model="other")
    assert (await plan(model="toy")).model == "toy"


async def test_defaults() -> None:
    made = await plan()
    assert made.prompt_token_ids == ids("abc")
    assert made.stop.max_tokens == 61  # up to the model's limit
    assert made.stop.eos_token_ids == (EOS,)
    assert (made.n, made.sampling.temperature, made.sampling.top_k) == (1, 1.0, 0)
    assert made.timeout_s == 600.0


async def test_limits_themselves_are_allowed() -> None:
    made = await plan(
        token_ids=(VOCAB_SIZE - 1,) * 60,
        max_tokens=4,
        min_tokens=4,
        resume_token_ids=(1, 2, 3),
        seed=2**64 - 1,
        top_logprobs=20,
        stop=("x" * 256,) * 16,
        stop_token_ids=(5,) * 64,
        request_id="é" * 128,
        traffic_class="x" * 64,
        priority=-100,
        timeout_ms=1,
        speculation=SpeculationChoice(max_tokens=7),
        temperature=100.0,
        top_p=1.0,
        repetition_penalty=10.0,
    )
    assert made.stop.max_tokens == 4
    assert made.timeout_s == 0.001
    assert (await plan(token_ids=(1,) * 63)).stop.max_tokens == 1


async def test_draft_slack_is_never_the_clients_matter() -> None:
    wish = SpeculationChoice(max_tokens=7)
    assert (await plan(text="x" * 40, max_tokens=24, speculation=wish)).stop.max_tokens == 24


async def test_greedy_with_several_choices_is_allowed() -> None:
    made = await plan(n=2, temperature=0.0, max_tokens=5)
    assert made.sampling.greedy
    assert made.in_flight_tokens(100) == 16
    assert made.in_flight_tokens(1) == 8


async def test_each_choice_has_its_own_noise_from_the_echoed_seed() -> None:
    requests = (await plan(n=3, seed=7)).sequence_requests(timeout_s=1.5, traceparent="t")
    assert [one.noise_key for one in requests] == [derive_key(7, index) for index in range(3)]
    assert [one.choice_index for one in requests] == [0, 1, 2]
    assert {one.timeout_s for one in requests} == {1.5}


async def test_unset_seeds_differ() -> None:
    assert (await plan()).seed != (await plan()).seed


async def test_ends_are_suppressed_below_min_tokens() -> None:
    made = await plan(min_tokens=3, stop_token_ids=(5, EOS))
    assert made.sampling.suppressed_token_ids == (EOS, 5)
    assert made.sampling.min_tokens == made.stop.min_tokens == 3
    assert (await plan(stop_token_ids=(5,))).sampling.suppressed_token_ids == ()


async def test_ignored_end_of_text_may_be_resumed() -> None:
    made = await plan(ignore_eos=True, resume_token_ids=(EOS, 1))
    assert made.stop.eos_token_ids == ()
    assert made.resume_token_ids == (EOS, 1)


async def test_ends_below_min_tokens_may_be_resumed() -> None:
    fields: dict[str, Any] = {"stop": ("END",), "stop_token_ids": (5,), "resume_token_ids": (*ids("END"), 5)}
    assert (await plan(min_tokens=5, **fields)).resume_token_ids == (*ids("END"), 5)
    with pytest.raises(InvalidRequest, match="stop token 5 at index 3"):
        await plan(min_tokens=4, **fields)


async def test_conversation_goes_through_the_template() -> None:
    messages = (ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="yo"))
    assert bytes(one for one in (await plan(messages=messages)).prompt_token_ids if one < 256) == b"u:hia:yoa:"
    continued = await plan(messages=messages, continue_final_message=True)
    assert bytes(one for one in continued.prompt_token_ids if one < 256) == b"u:hia:yo"


async def test_long_text_is_tokenized_alike() -> None:
    limits = RouterLimits(model="toy", max_model_len=20_000)
    assert (await plan(limits, text="é" * 5000)).prompt_token_ids == ids("é" * 5000)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model": ""}, "model"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_choices": 0}, "max_choices"),
        ({"max_num_speculative_tokens": -1}, "max_num_speculative_tokens"),
        ({"default_timeout_ms": 10, "max_timeout_ms": 5}, "default_timeout_ms"),
        ({"default_timeout_ms": 0}, "default_timeout_ms"),
    ],
)
def test_limits_that_cannot_work_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        RouterLimits(**{"model": "toy", "max_model_len": 64, **fields})


@pytest.mark.parametrize(
    "name", ["max_requests", "max_tokens", "max_charged_output_tokens", "max_requests_per_key", "min_retry_after_s"]
)
def test_admission_limits_that_cannot_work_are_refused(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=name):
        AdmissionLimits(**values)

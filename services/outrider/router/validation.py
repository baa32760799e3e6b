"""The one place that holds a request against the contract: every field, each error naming field and limit.

In three parts, cheapest first: `check_fields` needs nothing but the request, `plan_request` needs
the prompt's tokens, `resume_text` needs the detokenizer.
"""

import secrets
from collections.abc import Sequence

from outrider.core.errors import InvalidRequest, ModelNotFound, Unsupported
from outrider.core.generation import GenerationRequest
from outrider.core.request import StopConditions
from outrider.core.sampling import SamplingParams
from outrider.router.codec import TextCodec, input_field
from outrider.router.limits import RouterLimits
from outrider.router.output_text import OutputText
from outrider.router.plan import RequestPlan
from outrider.router.text_fields import check_input, check_labels, check_stop

__all__ = ["check_fields", "plan_request", "resume_text"]

_MAX_SEED = 2**64 - 1


def check_fields(request: GenerationRequest, limits: RouterLimits) -> None:
    """Check all that can be said without the tokenizer.

    Raises `ModelNotFound`, `Unsupported` or `InvalidRequest`.
    """
    if request.model not in ("", limits.model):
        raise ModelNotFound(request.model, limits.model)
    _check_unsupported(request, limits)
    check_labels(request, limits)
    check_input(request, limits)
    check_stop(request, limits)
    _check_lengths(request)
    _check_numbers(request, limits)
    _sampling(request, ())


def plan_request(
    request: GenerationRequest, prompt_token_ids: tuple[int, ...], limits: RouterLimits, codec: TextCodec
) -> RequestPlan:
    """Check token ids and lengths, and fill in the defaults, of a request that passed `check_fields`.

    Raises `InvalidRequest`.
    """
    _check_ids(request, codec.vocab_size)
    max_tokens = _max_tokens(request, len(prompt_token_ids), limits)
    _check_resume(request, max_tokens)
    eos_token_ids = () if request.ignore_eos else tuple(codec.eos_token_ids)
    stop = StopConditions(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        eos_token_ids=eos_token_ids,
        token_ids=request.stop_token_ids,
        strings=request.stop,
        skip_special_tokens=request.skip_special_tokens,
    )
    _check_resume_ids(request.resume_token_ids, stop)
    return RequestPlan(
        request_id=request.request_id,
        model=limits.model,
        prompt_token_ids=prompt_token_ids,
        resume_token_ids=request.resume_token_ids,
        sampling=_sampling(request, eos_token_ids),
        stop=stop,
        include_stop_str=request.include_stop_str,
        n=1 if request.n is None else request.n,
        seed=secrets.randbits(64) if request.seed is None else request.seed,
        top_logprobs=request.top_logprobs,
        speculation=request.speculation,
        priority=request.priority,
        traffic_class=request.traffic_class,
        timeout_s=(limits.default_timeout_ms if request.timeout_ms is None else request.timeout_ms) / 1000,
    )


def resume_text(plan: RequestPlan, codec: TextCodec) -> OutputText:
    """The text state of a choice after its resumed tokens; their text is not shown again.

    Raises `InvalidRequest` when the resumed output already ended at a stop string.
    """
    text = OutputText(
        codec, prompt_token_ids=plan.prompt_token_ids, stop=plan.stop, include_stop_str=plan.include_stop_str
    )
    for token_id in plan.resume_token_ids:
        text.feed(token_id)
        if text.found_stop_string is not None:
            raise InvalidRequest("resume_token_ids", f"already contain the stop string {text.found_stop_string!r}")
    return text


def _check_unsupported(request: GenerationRequest, limits: RouterLimits) -> None:
    if request.constraint is not None:
        raise Unsupported(request.constraint, "this deployment has no grammar engine")
    if request.adapter:
        raise Unsupported("adapter", f"{request.adapter!r} is not served; this deployment has no adapters")
    if request.speculation.rule not in limits.verification_rules:
        offered = ", ".join(rule.name for rule in limits.verification_rules)
        raise Unsupported(
            "speculation.rule", f"{request.speculation.rule.name} is not offered here; offered: {offered}"
        )


def _check_lengths(request: GenerationRequest) -> None:
    if request.max_tokens is not None:
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{request.max_tokens} is below 1")
        if request.min_tokens > request.max_tokens:
            raise InvalidRequest("min_tokens", f"{request.min_tokens} is above max_tokens {request.max_tokens}")
    if request.resume_token_ids and request.n not in (None, 1):
        raise InvalidRequest("n", f"{request.n} cannot go with resume_token_ids, which continue 1 choice")


def _check_numbers(request: GenerationRequest, limits: RouterLimits) -> None:
    if request.n is not None:
        _check_range("n", request.n, 1, limits.max_choices)
    if request.seed is not None:
        _check_range("seed", request.seed, 0, _MAX_SEED)
    if request.top_logprobs is not None:
        _check_range("top_logprobs", request.top_logprobs, 0, limits.max_top_logprobs)
    if request.timeout_ms is not None:
        _check_range("timeout_ms", request.timeout_ms, 1, limits.max_timeout_ms)
    if request.speculation.max_tokens is not None:
        _check_range("speculation.max_tokens", request.speculation.max_tokens, 0, limits.max_num_speculative_tokens)
    _check_range("priority", request.priority, -limits.max_abs_priority, limits.max_abs_priority)


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(field, f"{value} is outside [{low}, {high}]")


def _sampling(request: GenerationRequest, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Sampling parameters with defaults; their own checks name the field."""
    defaults = SamplingParams()
    suppressed = tuple(dict.fromkeys((*eos_token_ids, *request.stop_token_ids))) if request.min_tokens > 0 else ()
    return SamplingParams(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_k=defaults.top_k if request.top_k is None else request.top_k,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        repetition_penalty=(
            defaults.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
        ),
        frequency_penalty=defaults.frequency_penalty
        if request.frequency_penalty is None
        else request.frequency_penalty,
        presence_penalty=defaults.presence_penalty if request.presence_penalty is None else request.presence_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        suppressed_token_ids=suppressed,
    )


def _check_ids(request: GenerationRequest, vocab_size: int) -> None:
    fields: tuple[tuple[str, Sequence[int]], ...] = (
        ("token_ids", request.token_ids or ()),
        ("resume_token_ids", request.resume_token_ids),
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in request.logit_bias]),
    )
    for field, ids in fields:
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            at, bad = next((at, one) for at, one in enumerate(ids) if not 0 <= one < vocab_size)
            raise InvalidRequest(field, f"id {bad} at index {at} is outside the vocabulary [0, {vocab_size - 1}]")


def _max_tokens(request: GenerationRequest, prompt_len: int, limits: RouterLimits) -> int:
    """The output limit in force. The user limit alone counts; draft slack is the engine's matter."""
    field, longest = input_field(request), limits.max_model_len
    if prompt_len < 1:
        raise InvalidRequest(field, "holds no token")
    if prompt_len >= longest:
        raise InvalidRequest(
            field, f"the prompt has {prompt_len} tokens; max_model_len {longest} leaves no room for one output token"
        )
    if request.max_tokens is None:
        if request.min_tokens > longest - prompt_len:
            room = longest - prompt_len
            raise InvalidRequest("min_tokens", f"{request.min_tokens} is above the {room} that max_model_len leaves")
        return longest - prompt_len
    if prompt_len + request.max_tokens > longest:
        raise InvalidRequest(
            "max_tokens",
            f"{request.max_tokens} and a prompt of {prompt_len} tokens exceed max_model_len {longest}",
        )
    return request.max_tokens


def _check_resume(request: GenerationRequest, max_tokens: int) -> None:
    count = len(request.resume_token_ids)
    if count >= max_tokens:
        raise InvalidRequest(
            "resume_token_ids", f"{count} tokens leave nothing to generate: max_tokens is {max_tokens}"
        )


def _check_resume_ids(resume_token_ids: tuple[int, ...], stop: StopConditions) -> None:
    """Refuse output that had ended: nothing may follow an end-of-text or stop token."""
    ends = frozenset(stop.eos_token_ids) | frozenset(stop.token_ids)
    for at, token_id in enumerate(resume_token_ids):
        if token_id in ends and at + 1 >= stop.min_tokens:
            kind = "end-of-text" if token_id in stop.eos_token_ids else "stop"
            raise InvalidRequest("resume_token_ids", f"already contain the {kind} token {token_id} at index {at}")

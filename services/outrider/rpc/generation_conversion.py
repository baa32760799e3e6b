"""`generation.proto` to and from the domain values of the public API.

The client's side raises `ProtocolError` for a malformed answer, the server's side `InvalidRequest`
for a malformed request. Ranges are the router's business (`validation`), not decided here.
"""

from collections.abc import Sequence

from outrider.core.errors import InvalidRequest
from outrider.core.generation import (
    ChatMessage,
    ChoiceEnd,
    GenerationAccepted,
    GenerationEvent,
    GenerationRequest,
    ModelDescription,
    TextDelta,
    Usage,
)
from outrider.core.sequence import Finish
from outrider.rpc.enums import FINISH_REASONS, protocol_error
from outrider.rpc.report_conversion import (
    logprobs_from_proto,
    logprobs_to_proto,
    outcome_from_proto,
    outcome_to_proto,
    timings_from_proto,
    timings_to_proto,
)
from outrider.rpc.sampling_conversion import choice_from_proto, choice_to_proto
from outrider.v1 import generation_pb2 as pb

__all__ = [
    "event_from_proto",
    "event_to_proto",
    "final_from_proto",
    "final_to_proto",
    "model_from_proto",
    "model_to_proto",
    "request_from_proto",
    "request_to_proto",
    "usage_to_proto",
]

_UINT32 = range(2**32)
_OPTIONAL_NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "n",
    "top_logprobs",
    "timeout_ms",
)
_UNSIGNED_32 = ("max_tokens", "min_tokens", "top_k", "n", "top_logprobs", "timeout_ms")
_ID_LISTS = ("token_ids", "resume_token_ids", "stop_token_ids")


def request_to_proto(request: GenerationRequest) -> pb.GenerationSpec:
    """What a client sends. Raises `InvalidRequest` naming a number that the contract cannot carry."""
    _refuse_unsendable(request)
    spec = pb.GenerationSpec(
        request_id=request.request_id,
        model=request.model,
        resume_token_ids=request.resume_token_ids,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        logit_bias=dict(request.logit_bias),
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        include_stop_str=request.include_stop_str,
        skip_special_tokens=request.skip_special_tokens,
        adapter=request.adapter,
        priority=request.priority,
        traffic_class=request.traffic_class,
        speculation=choice_to_proto(request.speculation),
    )
    for name in _OPTIONAL_NUMBERS:
        if (value := getattr(request, name)) is not None:
            setattr(spec, name, value)
    if request.constraint is not None:
        setattr(spec, request.constraint, "")  # present, though empty
    if request.text is not None:
        spec.text = request.text
    elif request.messages is not None:
        turns = [pb.ChatMessage(role=one.role, content=one.content) for one in request.messages]
        spec.chat.CopyFrom(pb.ChatInput(messages=turns, continue_final_message=request.continue_final_message))
    elif request.token_ids is not None:
        spec.token_ids.CopyFrom(pb.TokenIds(ids=request.token_ids))
    return spec


def request_from_proto(spec: pb.GenerationSpec) -> GenerationRequest:
    """What a server receives; nothing set is None. Raises `InvalidRequest` for an unknown enum value."""
    kind = spec.WhichOneof("input")
    messages = tuple(ChatMessage(role=one.role, content=one.content) for one in spec.chat.messages)
    return GenerationRequest(
        request_id=spec.request_id,
        model=spec.model,
        text=spec.text if kind == "text" else None,
        messages=messages if kind == "chat" else None,
        continue_final_message=spec.chat.continue_final_message,
        token_ids=tuple(spec.token_ids.ids) if kind == "token_ids" else None,
        resume_token_ids=tuple(spec.resume_token_ids),
        min_tokens=spec.min_tokens,
        ignore_eos=spec.ignore_eos,
        logit_bias=tuple(sorted(spec.logit_bias.items())),
        stop=tuple(spec.stop),
        stop_token_ids=tuple(spec.stop_token_ids),
        include_stop_str=spec.include_stop_str,
        skip_special_tokens=spec.skip_special_tokens if spec.HasField("skip_special_tokens") else True,
        constraint=spec.WhichOneof("constraint"),
        adapter=spec.adapter,
        priority=spec.priority,
        traffic_class=spec.traffic_class,
        speculation=choice_from_proto(spec.speculation, InvalidRequest),
        max_tokens=spec.max_tokens if spec.HasField("max_tokens") else None,
        temperature=spec.temperature if spec.HasField("temperature") else None,
        top_p=spec.top_p if spec.HasField("top_p") else None,
        top_k=spec.top_k if spec.HasField("top_k") else None,
        min_p=spec.min_p if spec.HasField("min_p") else None,
        repetition_penalty=spec.repetition_penalty if spec.HasField("repetition_penalty") else None,
        frequency_penalty=spec.frequency_penalty if spec.HasField("frequency_penalty") else None,
        presence_penalty=spec.presence_penalty if spec.HasField("presence_penalty") else None,
        seed=spec.seed if spec.HasField("seed") else None,
        n=spec.n if spec.HasField("n") else None,
        top_logprobs=spec.top_logprobs if spec.HasField("top_logprobs") else None,
        timeout_ms=spec.timeout_ms if spec.HasField("timeout_ms") else None,
    )


def event_to_proto(event: GenerationEvent) -> pb.StreamGenerateResponse:
    """One event, one message."""
    if isinstance(event, GenerationAccepted):
        accepted = pb.Accepted(
            request_id=event.request_id, model=event.model, seed=event.seed, prompt_tokens=event.prompt_tokens
        )
        return pb.StreamGenerateResponse(accepted=accepted)
    if isinstance(event, TextDelta):
        delta = pb.Delta(
            choice_index=event.choice_index,
            first_token_index=event.first_token_index,
            text=event.text,
            token_ids=event.token_ids,
            logprobs=logprobs_to_proto(event.token_ids, event.logprobs),
            seed=event.seed,
        )
        return pb.StreamGenerateResponse(delta=delta)
    return pb.StreamGenerateResponse(final=final_to_proto(event))


def event_from_proto(message: pb.StreamGenerateResponse, stop: Sequence[str]) -> GenerationEvent:
    """Convert back; `stop` is the request's list. Raises `ProtocolError` naming a malformed field."""
    kind = message.WhichOneof("event")
    if kind == "accepted":
        accepted = message.accepted
        return GenerationAccepted(
            request_id=accepted.request_id,
            model=accepted.model,
            seed=accepted.seed,
            prompt_tokens=accepted.prompt_tokens,
        )
    if kind == "delta":
        delta = message.delta
        return TextDelta(
            choice_index=delta.choice_index,
            first_token_index=delta.first_token_index,
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            logprobs=logprobs_from_proto(delta.token_ids, delta.logprobs, "delta.logprobs"),
            seed=delta.seed,
        )
    if kind == "final":
        return final_from_proto(message.final, stop)
    raise protocol_error("event", "is not set")


def final_to_proto(end: ChoiceEnd) -> pb.Final:
    """The end of one choice."""
    return pb.Final(
        choice_index=end.choice_index,
        finish_reason=FINISH_REASONS.to_proto(end.finish.reason),
        stop_string=end.stop_string,
        stop_token_id=end.finish.stop_token_id,
        usage=usage_to_proto(end.usage),
        timings=timings_to_proto(end.timings),
        speculation=outcome_to_proto(end.speculation),
    )


def final_from_proto(message: pb.Final, stop: Sequence[str]) -> ChoiceEnd:
    """Convert back. The index of the stop string is looked up in the request's own list, `stop`."""
    stop_string = message.stop_string if message.HasField("stop_string") else None
    if stop_string is not None and stop_string not in stop:
        raise protocol_error("final.stop_string", f"{stop_string!r} is not among the request's stop strings")
    return ChoiceEnd(
        choice_index=message.choice_index,
        finish=Finish(
            reason=FINISH_REASONS.from_proto(message.finish_reason, "final.finish_reason"),
            stop_string_index=None if stop_string is None else list(stop).index(stop_string),
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        ),
        stop_string=stop_string,
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            cached_prompt_tokens=message.usage.cached_prompt_tokens,
        ),
        timings=timings_from_proto(message.timings),
        speculation=outcome_from_proto(message.speculation, "final.speculation"),
    )


def usage_to_proto(usage: Usage) -> pb.Usage:
    """Token counts."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def model_to_proto(model: ModelDescription) -> pb.GetModelInfoResponse:
    """The served model and its limits."""
    return pb.GetModelInfoResponse(
        model=model.model,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_num_speculative_tokens=model.max_num_speculative_tokens,
        max_choices=model.max_choices,
        max_top_logprobs=model.max_top_logprobs,
        unsupported_fields=model.unsupported_fields,
        server_version=model.server_version,
    )


def model_from_proto(message: pb.GetModelInfoResponse) -> ModelDescription:
    """Convert back."""
    return ModelDescription(
        model=message.model,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        max_num_speculative_tokens=message.max_num_speculative_tokens,
        max_choices=message.max_choices,
        max_top_logprobs=message.max_top_logprobs,
        unsupported_fields=tuple(message.unsupported_fields),
        server_version=message.server_version,
    )


def _refuse_unsendable(request: GenerationRequest) -> None:
    for name in _UNSIGNED_32:
        value = getattr(request, name)
        if value is not None and value not in _UINT32:
            raise InvalidRequest(name, f"{value} is outside [0, 2^32)")
    if request.seed is not None and not 0 <= request.seed < 2**64:
        raise InvalidRequest("seed", f"{request.seed} is outside [0, 2^64)")
    if not -(2**31) <= request.priority < 2**31:
        raise InvalidRequest("priority", f"{request.priority} is outside [-2^31, 2^31)")
    if request.speculation.max_tokens is not None and request.speculation.max_tokens not in _UINT32:
        raise InvalidRequest("speculation.max_tokens", f"{request.speculation.max_tokens} is outside [0, 2^32)")
    ids = [(name, one) for name in _ID_LISTS for one in getattr(request, name) or ()]
    ids += [("logit_bias", one) for one, _ in request.logit_bias]
    for name, one in ids:
        if one not in _UINT32:
            raise InvalidRequest(name, f"token id {one} is outside [0, 2^32)")
    if len({one for one, _ in request.logit_bias}) != len(request.logit_bias):
        raise InvalidRequest("logit_bias", "a token id appears twice")

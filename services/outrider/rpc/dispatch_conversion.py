"""`dispatch.proto` to and from the messages between router and engine."""

from outrider.core.dispatch import (
    EngineEvent,
    EngineHello,
    EngineReport,
    ReportRequest,
    RouterCommand,
    SequenceAbort,
    SequenceDelta,
    SequenceEnd,
    SequenceFailure,
    SequenceSubmit,
    UpdateGate,
)
from outrider.core.errors import ConfigError, InvalidRequest
from outrider.core.policy import ClassPolicy, GateSettings
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sequence import Finish
from outrider.rpc.enums import FINISH_REASONS, MODES, PREFERENCES, SEQUENCE_ERROR_CODES, protocol_error
from outrider.rpc.report_conversion import (
    logprobs_from_proto,
    logprobs_to_proto,
    outcome_from_proto,
    outcome_to_proto,
    status_from_proto,
    status_to_proto,
    timings_from_proto,
    timings_to_proto,
)
from outrider.rpc.sampling_conversion import (
    choice_from_proto,
    choice_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from outrider.v1 import dispatch_pb2 as pb
from outrider.v1.generation_pb2 import SPECULATION_MODE_UNSPECIFIED

__all__ = [
    "DISPATCH_PROTOCOL_VERSION",
    "command_from_proto",
    "command_to_proto",
    "event_from_proto",
    "event_to_proto",
]

DISPATCH_PROTOCOL_VERSION = 1


def command_to_proto(command: RouterCommand) -> pb.RouterCommand:
    """One command."""
    if isinstance(command, SequenceSubmit):
        return pb.RouterCommand(submit=_submit_to_proto(command))
    if isinstance(command, SequenceAbort):
        return pb.RouterCommand(abort=pb.AbortSequence(stream_key=command.stream_key))
    if isinstance(command, UpdateGate):
        return pb.RouterCommand(gate_settings=_gate_to_proto(command.settings))
    return pb.RouterCommand(report=pb.ReportRequest(nonce=command.nonce))


def command_from_proto(message: pb.RouterCommand) -> RouterCommand:
    """Convert back.

    Raises `InvalidRequest` when a sequence asks for what it cannot have (that sequence fails), and
    `ProtocolError` for everything else that is malformed; both name the field.
    """
    kind = message.WhichOneof("command")
    if kind == "submit":
        return _submit_from_proto(message.submit)
    if kind == "abort":
        return SequenceAbort(stream_key=message.abort.stream_key)
    if kind == "gate_settings":
        return UpdateGate(settings=_gate_from_proto(message.gate_settings))
    if kind == "report":
        return ReportRequest(nonce=message.report.nonce)
    raise protocol_error("command", f"{kind} is not expected here" if kind else "is not set")


def event_to_proto(event: EngineEvent) -> pb.EngineEvent:
    """One event."""
    if isinstance(event, SequenceDelta):
        delta = pb.SequenceDelta(
            stream_key=event.stream_key,
            first_token_index=event.first_token_index,
            token_ids=event.token_ids,
            logprobs=logprobs_to_proto(event.token_ids, event.logprobs),
        )
        return pb.EngineEvent(delta=delta)
    if isinstance(event, SequenceEnd):
        return pb.EngineEvent(end=_end_to_proto(event))
    if isinstance(event, EngineReport):
        return pb.EngineEvent(report=pb.EngineReport(nonce=event.nonce, status=status_to_proto(event.status)))
    hello = pb.EngineHello(
        engine_id=event.engine_id,
        engine_epoch=event.engine_epoch,
        model=event.model,
        protocol_version=DISPATCH_PROTOCOL_VERSION,
        max_model_len=event.max_model_len,
        kv_capacity_tokens=event.kv_capacity_tokens,
    )
    return pb.EngineEvent(hello=hello)


def event_from_proto(message: pb.EngineEvent) -> EngineEvent:
    """Convert back. Raises `ProtocolError` naming the field when the event is malformed."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        delta = message.delta
        return SequenceDelta(
            stream_key=delta.stream_key,
            first_token_index=delta.first_token_index,
            token_ids=tuple(delta.token_ids),
            logprobs=logprobs_from_proto(delta.token_ids, delta.logprobs, "delta.logprobs"),
        )
    if kind == "end":
        return _end_from_proto(message.end)
    if kind == "report":
        status = status_from_proto(message.report.status, "report.status")
        return EngineReport(status=status, nonce=message.report.nonce)
    if kind == "hello":
        return _hello_from_proto(message.hello)
    raise protocol_error("event", "is not set")


def _submit_to_proto(submit: SequenceSubmit) -> pb.SubmitSequence:
    request, stop = submit.request, submit.request.stop
    return pb.SubmitSequence(
        stream_key=submit.stream_key,
        request_id=request.request_id,
        choice_index=request.choice_index,
        prompt_token_ids=request.prompt_token_ids,
        resume_token_ids=request.resume_token_ids,
        sampling=sampling_to_proto(request.sampling),
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        ignore_eos=not stop.eos_token_ids,
        eos_token_ids=stop.eos_token_ids,
        stop=stop.strings,
        stop_token_ids=stop.token_ids,
        skip_special_tokens=stop.skip_special_tokens,
        noise_key=request.noise_key,
        key_id=request.key_id,
        top_logprobs=request.top_logprobs,
        speculation=choice_to_proto(request.speculation),
        priority=request.priority,
        traffic_class=request.traffic_class,
        timeout_ms=_milliseconds_left(request.timeout_s),
        no_timeout=request.timeout_s is None,
        traceparent=request.traceparent,
    )


def _milliseconds_left(timeout_s: float | None) -> int:
    """Rounded, but 0 only for what is over; at most what the field holds (49 days)."""
    if timeout_s is None or timeout_s <= 0:
        return 0
    return min(max(round(timeout_s * 1e3), 1), 2**32 - 1)


def _submit_from_proto(message: pb.SubmitSequence) -> SequenceSubmit:
    if not message.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "is empty")
    if message.max_tokens == 0:
        raise InvalidRequest("max_tokens", "0 is below 1")
    if message.ignore_eos and message.eos_token_ids:
        raise InvalidRequest("eos_token_ids", "is set although ignore_eos is")
    request = SequenceRequest(
        request_id=message.request_id,
        choice_index=message.choice_index,
        prompt_token_ids=tuple(message.prompt_token_ids),
        resume_token_ids=tuple(message.resume_token_ids),
        sampling=sampling_from_proto(message.sampling),
        stop=StopConditions(
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            eos_token_ids=tuple(message.eos_token_ids),
            token_ids=tuple(message.stop_token_ids),
            strings=tuple(message.stop),
            skip_special_tokens=message.skip_special_tokens,
        ),
        noise_key=message.noise_key,
        key_id=message.key_id,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        speculation=choice_from_proto(message.speculation, InvalidRequest),
        priority=message.priority,
        traffic_class=message.traffic_class,
        timeout_s=None if message.no_timeout else message.timeout_ms / 1e3,
        traceparent=message.traceparent,
    )
    return SequenceSubmit(stream_key=message.stream_key, request=request)


def _gate_to_proto(settings: GateSettings) -> pb.GateSettings:
    return pb.GateSettings(
        preference=PREFERENCES.to_proto(settings.preference),
        max_num_draft_tokens=settings.max_num_draft_tokens,
        batch_size_threshold=settings.batch_size_threshold,
        batch_size_hysteresis=settings.batch_size_hysteresis,
        min_acceptance_rate=settings.min_acceptance_rate,
        max_temperature=settings.max_temperature,
        probe_interval_rounds=settings.probe_interval_rounds,
        mode=SPECULATION_MODE_UNSPECIFIED if settings.mode is None else MODES.to_proto(settings.mode),
        max_branches=settings.max_branches,
        classes=[
            pb.ClassPolicy(
                traffic_class=one.traffic_class,
                preference=None if one.preference is None else PREFERENCES.to_proto(one.preference),
                max_num_draft_tokens=one.max_num_draft_tokens,
            )
            for one in settings.classes
        ],
    )


def _gate_from_proto(message: pb.GateSettings) -> GateSettings:
    try:
        return GateSettings(
            preference=PREFERENCES.from_proto(message.preference, "gate_settings.preference"),
            max_num_draft_tokens=message.max_num_draft_tokens,
            batch_size_threshold=message.batch_size_threshold if message.HasField("batch_size_threshold") else None,
            batch_size_hysteresis=message.batch_size_hysteresis,
            min_acceptance_rate=message.min_acceptance_rate,
            max_temperature=message.max_temperature if message.HasField("max_temperature") else None,
            probe_interval_rounds=message.probe_interval_rounds,
            mode=MODES.from_proto(message.mode, "gate_settings.mode") if message.mode else None,
            max_branches=message.max_branches,
            classes=tuple(_class_from_proto(one) for one in message.classes),
        )
    except ConfigError as error:
        raise protocol_error("gate_settings", str(error)) from error


def _class_from_proto(message: pb.ClassPolicy) -> ClassPolicy:
    field = "gate_settings.classes.preference"
    return ClassPolicy(
        traffic_class=message.traffic_class,
        preference=PREFERENCES.from_proto(message.preference, field) if message.HasField("preference") else None,
        max_num_draft_tokens=message.max_num_draft_tokens if message.HasField("max_num_draft_tokens") else None,
    )


def _hello_from_proto(message: pb.EngineHello) -> EngineHello:
    if message.protocol_version != DISPATCH_PROTOCOL_VERSION:
        raise protocol_error("hello.protocol_version", f"{message.protocol_version} is not spoken here")
    return EngineHello(
        engine_id=message.engine_id,
        engine_epoch=message.engine_epoch,
        model=message.model,
        max_model_len=message.max_model_len,
        kv_capacity_tokens=message.kv_capacity_tokens,
    )


def _end_to_proto(end: SequenceEnd) -> pb.SequenceEnd:
    message = pb.SequenceEnd(
        stream_key=end.stream_key,
        cached_prompt_tokens=end.cached_prompt_tokens,
        timings=timings_to_proto(end.timings),
        speculation=outcome_to_proto(end.speculation),
    )
    if end.finish is not None:
        message.finish_reason = FINISH_REASONS.to_proto(end.finish.reason)
        if end.finish.stop_string_index is not None:
            message.stop_string_index = end.finish.stop_string_index
        if end.finish.stop_token_id is not None:
            message.stop_token_id = end.finish.stop_token_id
    if end.failure is not None:
        message.error_code = SEQUENCE_ERROR_CODES.to_proto(end.failure.code)
        message.error_message = end.failure.message
    return message


def _end_from_proto(message: pb.SequenceEnd) -> SequenceEnd:
    finished, failed = message.finish_reason != 0, message.error_code != 0
    if finished == failed:
        raise protocol_error("end.finish_reason", "exactly one of finish_reason and error_code has to be set")
    finish = failure = None
    if finished:
        finish = Finish(
            reason=FINISH_REASONS.from_proto(message.finish_reason, "end.finish_reason"),
            stop_string_index=message.stop_string_index if message.HasField("stop_string_index") else None,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        )
    else:
        failure = SequenceFailure(
            code=SEQUENCE_ERROR_CODES.from_proto(message.error_code, "end.error_code"),
            message=message.error_message,
        )
    return SequenceEnd(
        stream_key=message.stream_key,
        finish=finish,
        failure=failure,
        cached_prompt_tokens=message.cached_prompt_tokens,
        timings=timings_from_proto(message.timings),
        speculation=outcome_from_proto(message.speculation, "end.speculation"),
    )

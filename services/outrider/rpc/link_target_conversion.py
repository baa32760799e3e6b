"""Events of the target on a link: to protobuf (target's side) and back (draft's side)."""

from collections.abc import Callable, Mapping

from outrider.core import link
from outrider.core.errors import InvalidRequest
from outrider.core.policy import RoundPlan
from outrider.rpc.enums import CAPABILITIES, MODES, PROPOSAL_SOURCES, REASONS, RULES, protocol_error
from outrider.rpc.feature_chunks import feature_chunks, features_from_proto
from outrider.rpc.sampling_conversion import sampling_from_proto, sampling_to_proto
from outrider.rpc.token_chunks import AssembledText, TextAssembler, token_chunks
from outrider.v1 import generation_pb2
from outrider.v1 import speculation_pb2 as pb

__all__ = ["hello_from_proto", "hello_to_proto", "target_event_from_proto", "target_event_to_proto"]


def hello_to_proto(hello: link.Hello) -> pb.Hello:
    """Link id and engine epoch travel in the header of the message."""
    return pb.Hello(
        engine_id=hello.engine_id,
        target_model=hello.target_model,
        vocab_size=hello.vocab_size,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        max_num_draft_tokens=hello.max_num_draft_tokens,
        max_model_len=hello.max_model_len,
        max_num_seqs=hello.max_num_seqs,
        capabilities=sorted(CAPABILITIES.to_proto(one) for one in hello.capabilities),
        auth_token=hello.auth_token,
    )


def hello_from_proto(message: pb.Hello, header: pb.LinkHeader) -> link.Hello:
    """Convert back. Capabilities that this side does not know are left out: nobody will use them."""
    return link.Hello(
        engine_id=message.engine_id,
        engine_epoch=header.engine_epoch,
        link_id=header.link_id,
        target_model=message.target_model,
        vocab_size=message.vocab_size,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        max_num_draft_tokens=message.max_num_draft_tokens,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        capabilities=CAPABILITIES.known(message.capabilities),
        auth_token=message.auth_token,
    )


def target_event_to_proto(event: link.TargetEvent) -> list[pb.TargetEvent]:
    """One event, in order; a long text becomes several."""
    if isinstance(event, link.Verdicts):
        return [pb.TargetEvent(verdicts=_verdicts_to_proto(event))]
    if isinstance(event, link.Launch):
        return [pb.TargetEvent(launch=_launch_to_proto(event))]
    if isinstance(event, link.OpenSequence):
        first, *rest = token_chunks(event.token_ids, 0)
        further = [pb.TargetEvent(resync=pb.Resync(handle=event.handle, text=chunk)) for chunk in rest]
        return [pb.TargetEvent(open_sequence=_open_to_proto(event, first)), *further]
    if isinstance(event, link.Resync):
        chunks = token_chunks(event.token_ids, event.first_position)
        return [pb.TargetEvent(resync=pb.Resync(handle=event.handle, text=chunk)) for chunk in chunks]
    if isinstance(event, link.Features):
        return [pb.TargetEvent(features=chunk) for chunk in feature_chunks(event)]
    return [_small_event_to_proto(event)]


def target_event_from_proto(message: pb.TargetEvent, assembler: TextAssembler) -> link.TargetEvent | None:
    """Convert back; None while further chunks of a text are to come.

    Raises `ProtocolError` naming the field when the event is malformed or of an unknown kind.
    """
    kind = message.WhichOneof("event")
    if kind == "open_sequence":
        return _text_from_proto(message.open_sequence.handle, assembler.open(message.open_sequence))
    if kind == "resync":
        return _text_from_proto(message.resync.handle, assembler.resync(message.resync))
    if kind == "close_sequence":
        assembler.forget(message.close_sequence.handle)
        return link.CloseSequence(handle=message.close_sequence.handle)
    read = _READERS.get(kind or "")
    if read is None:
        raise protocol_error("event", f"{kind} is not expected here" if kind else "is not set")
    return read(message)


def _small_event_to_proto(
    event: link.CloseSequence | link.PauseSequences | link.ResumeSequences | link.Ping | link.Goodbye,
) -> pb.TargetEvent:
    if isinstance(event, link.CloseSequence):
        return pb.TargetEvent(close_sequence=pb.CloseSequence(handle=event.handle))
    if isinstance(event, link.PauseSequences):
        return pb.TargetEvent(pause_sequences=pb.PauseSequences(handles=event.handles))
    if isinstance(event, link.ResumeSequences):
        return pb.TargetEvent(resume_sequences=pb.ResumeSequences(handles=event.handles))
    if isinstance(event, link.Ping):
        return pb.TargetEvent(ping=pb.Ping(nonce=event.nonce))
    return pb.TargetEvent(goodbye=pb.Goodbye(reason=event.reason))


def _open_to_proto(event: link.OpenSequence, text: pb.TokenChunk) -> pb.OpenSequence:
    return pb.OpenSequence(
        handle=event.handle,
        prompt_len=event.prompt_len,
        sampling=sampling_to_proto(event.sampling),
        noise_key=event.noise_key,
        rule=RULES.to_proto(event.rule),
        eos_token_ids=event.eos_token_ids,
        text=text,
        traceparent=event.traceparent,
    )


def _text_from_proto(handle: int, text: AssembledText | None) -> link.OpenSequence | link.Resync | None:
    if text is None:
        return None
    if text.opening is None:
        return link.Resync(handle=handle, first_position=text.first_position, token_ids=text.token_ids)
    message = text.opening
    if message.prompt_len > len(text.token_ids):
        raise protocol_error("open_sequence.prompt_len", f"{message.prompt_len} of {len(text.token_ids)} tokens")
    if message.rule == generation_pb2.VERIFICATION_RULE_UNSPECIFIED:
        raise protocol_error("open_sequence.rule", "is not set")
    try:
        sampling = sampling_from_proto(message.sampling)
    except InvalidRequest as error:
        raise protocol_error(f"open_sequence.sampling.{error.field}", error.problem) from error
    return link.OpenSequence(
        handle=handle,
        token_ids=text.token_ids,
        prompt_len=message.prompt_len,
        sampling=sampling,
        noise_key=message.noise_key,
        rule=RULES.from_proto(message.rule, "open_sequence.rule"),
        eos_token_ids=tuple(message.eos_token_ids),
        traceparent=message.traceparent,
    )


def _verdicts_to_proto(event: link.Verdicts) -> pb.Verdicts:
    rows = [
        pb.VerdictRow(
            handle=row.handle,
            base_len=row.base_len,
            block_id=row.block_id,
            num_accepted=row.num_accepted,
            next_token_id=row.next_token_id,
            accepted_token_ids=row.accepted_token_ids,
            prefix_hash=row.prefix_hash,
            plan=_plan_to_proto(row.plan),
        )
        for row in event.rows
    ]
    return pb.Verdicts(step=event.step, rows=rows)


def _verdicts_from_proto(message: pb.Verdicts) -> link.Verdicts:
    return link.Verdicts(step=message.step, rows=tuple(_verdict_row(row) for row in message.rows))


def _verdict_row(row: pb.VerdictRow) -> link.VerdictRow:
    accepted_ids = tuple(row.accepted_token_ids)
    if accepted_ids and len(accepted_ids) != row.num_accepted:
        raise protocol_error("verdicts.rows.accepted_token_ids", f"{len(accepted_ids)} ids of {row.num_accepted}")
    return link.VerdictRow(
        handle=row.handle,
        base_len=row.base_len,
        block_id=row.block_id,
        num_accepted=row.num_accepted,
        next_token_id=row.next_token_id,
        accepted_token_ids=accepted_ids,
        prefix_hash=row.prefix_hash,
        plan=_plan_from_proto(row.plan, "verdicts.rows.plan"),
    )


def _plan_to_proto(plan: RoundPlan) -> pb.RoundPlan:
    return pb.RoundPlan(
        mode=MODES.to_proto(plan.mode),
        num_draft_tokens=plan.num_draft_tokens,
        branch_budget=plan.branch_budget,
        reason=REASONS.to_proto(plan.reason),
    )


def _plan_from_proto(message: pb.RoundPlan, field: str) -> RoundPlan:
    return RoundPlan(
        mode=MODES.from_proto(message.mode, f"{field}.mode"),
        num_draft_tokens=message.num_draft_tokens,
        branch_budget=message.branch_budget,
        reason=REASONS.from_proto(message.reason, f"{field}.reason"),
    )


def _launch_to_proto(event: link.Launch) -> pb.Launch:
    rows = [
        pb.LaunchRow(
            handle=row.handle,
            base_len=row.base_len,
            block_id=row.block_id,
            num_used=row.num_used,
            source=(pb.PROPOSAL_SOURCE_UNSPECIFIED if row.source is None else PROPOSAL_SOURCES.to_proto(row.source)),
            token_ids=row.token_ids,
            ahead=_plan_to_proto(row.ahead),
            num_arrived=row.num_arrived,
        )
        for row in event.rows
    ]
    return pb.Launch(step=event.step, rows=rows, budget_us=event.budget_us)


def _launch_from_proto(message: pb.Launch) -> link.Launch:
    rows = tuple(_launch_row(row) for row in message.rows)
    return link.Launch(step=message.step, rows=rows, budget_us=message.budget_us)


def _launch_row(row: pb.LaunchRow) -> link.LaunchRow:
    token_ids = tuple(row.token_ids)
    if token_ids and len(token_ids) != row.num_used:
        raise protocol_error("launch.rows.token_ids", f"{len(token_ids)} ids where num_used is {row.num_used}")
    plain = row.source == pb.PROPOSAL_SOURCE_UNSPECIFIED
    return link.LaunchRow(
        handle=row.handle,
        base_len=row.base_len,
        block_id=row.block_id,
        num_used=row.num_used,
        num_arrived=row.num_arrived,
        source=None if plain else PROPOSAL_SOURCES.from_proto(row.source, "launch.rows.source"),
        token_ids=token_ids,
        ahead=_plan_from_proto(row.ahead, "launch.rows.ahead"),
    )


_READERS: Mapping[str, Callable[[pb.TargetEvent], link.TargetEvent]] = {
    "verdicts": lambda message: _verdicts_from_proto(message.verdicts),
    "launch": lambda message: _launch_from_proto(message.launch),
    "pause_sequences": lambda message: link.PauseSequences(handles=tuple(message.pause_sequences.handles)),
    "resume_sequences": lambda message: link.ResumeSequences(handles=tuple(message.resume_sequences.handles)),
    "features": lambda message: features_from_proto(message.features),
    "ping": lambda message: link.Ping(nonce=message.ping.nonce),
    "goodbye": lambda message: link.Goodbye(reason=message.goodbye.reason),
}

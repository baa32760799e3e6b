"""What the public API and the dispatch stream both report: log-probabilities, timings, counters, status."""

from collections.abc import Iterable, Sequence

from outrider.core.dispatch import DraftLinkStatus, EngineStatus, SpeculationOutcome, SpeculationTotals, Timings
from outrider.core.speculation import SpeculationStats
from outrider.core.verdict import TokenLogprobs
from outrider.rpc.enums import MODES, REASONS, protocol_error
from outrider.rpc.fleet_conversion import errors_from_proto, errors_to_proto
from outrider.v1 import generation_pb2 as pb

__all__ = [
    "logprobs_from_proto",
    "logprobs_to_proto",
    "outcome_from_proto",
    "outcome_to_proto",
    "status_from_proto",
    "status_to_proto",
    "timings_from_proto",
    "timings_to_proto",
]


def logprobs_to_proto(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprob]:
    """One message per token; none when no log-probabilities were asked for."""
    if logprobs and len(logprobs) != len(token_ids):
        raise protocol_error("logprobs", f"{len(logprobs)} for {len(token_ids)} tokens")
    return [
        pb.TokenLogprob(
            token_id=token_id,
            logprob=one.logprob,
            top=[pb.TopLogprob(token_id=top_id, logprob=value) for top_id, value in one.top],
        )
        for token_id, one in zip(token_ids, logprobs, strict=False)
    ]


def logprobs_from_proto(
    token_ids: Sequence[int], messages: Sequence[pb.TokenLogprob], field: str
) -> tuple[TokenLogprobs, ...]:
    """Convert back. Raises `ProtocolError` when there are some, but not one for each token."""
    if messages and [message.token_id for message in messages] != list(token_ids):
        raise protocol_error(field, f"{len(messages)} entries do not match the {len(token_ids)} tokens")
    return tuple(
        TokenLogprobs(logprob=message.logprob, top=tuple((top.token_id, top.logprob) for top in message.top))
        for message in messages
    )


def timings_to_proto(timings: Timings) -> pb.Timings:
    """Seconds to milliseconds."""
    return pb.Timings(
        queue_ms=timings.queue_s * 1e3,
        prefill_ms=timings.prefill_s * 1e3,
        first_token_ms=timings.first_token_s * 1e3,
        total_ms=timings.total_s * 1e3,
    )


def timings_from_proto(message: pb.Timings) -> Timings:
    """Milliseconds to seconds."""
    return Timings(
        queue_s=message.queue_ms / 1e3,
        prefill_s=message.prefill_ms / 1e3,
        first_token_s=message.first_token_ms / 1e3,
        total_s=message.total_ms / 1e3,
    )


def outcome_to_proto(outcome: SpeculationOutcome) -> pb.SpeculationReport:
    """Raw counters, and the hit rate for readers that do not divide themselves."""
    stats = outcome.stats
    return pb.SpeculationReport(
        mode=MODES.to_proto(outcome.mode),
        reason=REASONS.to_proto(outcome.reason),
        rounds=stats.rounds,
        speculative_rounds=stats.speculative_rounds,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        accepted_per_position=stats.accepted_per_position,
        verified_per_position=stats.verified_per_position,
        committed=stats.committed,
        cut=stats.cut,
        late=stats.late,
        stale=stats.stale,
        late_laws=stats.late_laws,
        hit_rate=stats.hit_rate,
        estimated_speedup=outcome.estimated_speedup,
        cached_hits=stats.cached_hits,
        cached_lookups=stats.cached_lookups,
        forward_rows=stats.forward_rows,
    )


def outcome_from_proto(message: pb.SpeculationReport, field: str) -> SpeculationOutcome:
    """Convert back. Raises `ProtocolError` for an unknown mode or reason."""
    stats = SpeculationStats(
        rounds=message.rounds,
        speculative_rounds=message.speculative_rounds,
        drafted=message.drafted,
        verified=message.verified,
        accepted=message.accepted,
        cut=message.cut,
        committed=message.committed,
        accepted_per_position=list(message.accepted_per_position),
        verified_per_position=list(message.verified_per_position),
        late=message.late,
        stale=message.stale,
        late_laws=message.late_laws,
        cached_hits=message.cached_hits,
        cached_lookups=message.cached_lookups,
        forward_rows=message.forward_rows,
    )
    return SpeculationOutcome(
        mode=MODES.from_proto(message.mode, f"{field}.mode"),
        reason=REASONS.from_proto(message.reason, f"{field}.reason"),
        stats=stats,
        estimated_speedup=message.estimated_speedup if message.HasField("estimated_speedup") else None,
    )


def status_to_proto(status: EngineStatus) -> pb.EngineStatus:
    """The state of one engine."""
    return pb.EngineStatus(
        engine_id=status.engine_id,
        ready=status.ready,
        problem=status.problem,
        running=status.running,
        waiting=status.waiting,
        kv_usage=status.kv_usage,
        mode=MODES.to_proto(status.mode),
        reason=REASONS.to_proto(status.reason),
        mean_num_draft_tokens=status.mean_num_draft_tokens,
        acceptance_rate=status.acceptance_rate,
        estimated_speedup=status.estimated_speedup,
        draft_links=_links_to_proto(status.draft_links),
        totals=_totals_to_proto(status.totals),
        node=status.node,
        starts=status.starts,
        recent_errors=errors_to_proto(status.recent_errors),
    )


def status_from_proto(message: pb.EngineStatus, field: str) -> EngineStatus:
    """Convert back. Raises `ProtocolError` for an unknown mode or reason."""
    return EngineStatus(
        engine_id=message.engine_id,
        ready=message.ready,
        problem=message.problem,
        running=message.running,
        waiting=message.waiting,
        kv_usage=message.kv_usage,
        mode=MODES.from_proto(message.mode, f"{field}.mode"),
        reason=REASONS.from_proto(message.reason, f"{field}.reason"),
        mean_num_draft_tokens=message.mean_num_draft_tokens,
        acceptance_rate=message.acceptance_rate if message.HasField("acceptance_rate") else None,
        estimated_speedup=message.estimated_speedup if message.HasField("estimated_speedup") else None,
        draft_links=tuple(_link_from_proto(one) for one in message.draft_links),
        totals=_totals_from_proto(message.totals),
        node=message.node,
        starts=message.starts,
        recent_errors=errors_from_proto(message.recent_errors),
    )


def _links_to_proto(links: Iterable[DraftLinkStatus]) -> list[pb.DraftLinkStatus]:
    return [
        pb.DraftLinkStatus(
            address=one.address,
            connected=one.connected,
            incarnation=one.incarnation,
            open_sequences=one.open_sequences,
            problem=one.problem,
            losses=one.losses,
            round_trip_ms=one.round_trip_s * 1e3,
        )
        for one in links
    ]


def _link_from_proto(message: pb.DraftLinkStatus) -> DraftLinkStatus:
    return DraftLinkStatus(
        address=message.address,
        connected=message.connected,
        incarnation=message.incarnation,
        open_sequences=message.open_sequences,
        problem=message.problem,
        losses=message.losses,
        round_trip_s=message.round_trip_ms / 1e3,
    )


def _totals_to_proto(totals: SpeculationTotals) -> pb.SpeculationTotals:
    return pb.SpeculationTotals(
        steps=totals.steps,
        speculative_steps=totals.speculative_steps,
        rounds=totals.rounds,
        drafted=totals.drafted,
        verified=totals.verified,
        accepted=totals.accepted,
        committed=totals.committed,
        draft_messages_sent=totals.draft_messages_sent,
        draft_messages_received=totals.draft_messages_received,
        late=totals.late,
        stale=totals.stale,
        invalid=totals.invalid,
        late_laws=totals.late_laws,
        accepted_per_position=totals.accepted_per_position,
        verified_per_position=totals.verified_per_position,
        forward_rows=totals.forward_rows,
        preemptions=totals.preemptions,
        prefix_cache_queried_tokens=totals.prefix_cache_queried_tokens,
        prefix_cache_hit_tokens=totals.prefix_cache_hit_tokens,
        finished_sequences=totals.finished_sequences,
        failed_sequences=totals.failed_sequences,
        cached_lookups=totals.cached_lookups,
        cached_hits=totals.cached_hits,
        step_seconds=dict(totals.step_seconds),
    )


def _totals_from_proto(message: pb.SpeculationTotals) -> SpeculationTotals:
    return SpeculationTotals(
        steps=message.steps,
        speculative_steps=message.speculative_steps,
        rounds=message.rounds,
        drafted=message.drafted,
        verified=message.verified,
        accepted=message.accepted,
        committed=message.committed,
        draft_messages_sent=message.draft_messages_sent,
        draft_messages_received=message.draft_messages_received,
        late=message.late,
        stale=message.stale,
        invalid=message.invalid,
        late_laws=message.late_laws,
        accepted_per_position=tuple(message.accepted_per_position),
        verified_per_position=tuple(message.verified_per_position),
        forward_rows=message.forward_rows,
        preemptions=message.preemptions,
        prefix_cache_queried_tokens=message.prefix_cache_queried_tokens,
        prefix_cache_hit_tokens=message.prefix_cache_hit_tokens,
        finished_sequences=message.finished_sequences,
        failed_sequences=message.failed_sequences,
        cached_lookups=message.cached_lookups,
        cached_hits=message.cached_hits,
        step_seconds=tuple(sorted(message.step_seconds.items())),
    )

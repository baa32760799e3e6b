"""Every metric, as a definition. Raw counters; whoever shows them derives the rates.

Names have no dots, so that Ray and Prometheus take them. Ray puts `ray_` in front, and Prometheus
`_total` behind counters. Speculation has vLLM's names; serving has the names of OpenTelemetry's
GenAI conventions, which are still in development and therefore constants of our own.

With x' = rate(x) over a window (for Prometheus: `rate(x_total[5m])`, summed as wanted):

    acceptance rate               accepted' / verified'
    acceptance at position m      accepted_per_pos'{position=m} / verified_per_pos'{position=m}
    mean acceptance length        1 + accepted' / drafts'            (includes the extra token)
    draft tokens per round        verified' / drafts'
    wasted drafting               1 - verified' / draft_tokens'      (arrived, never verified)
    tokens per round              committed' / rounds'
    speculative share of steps    speculative_steps' / steps'
    late share                    late' / (late' + drafts')
    hit rate (cached mode)        cached_hits' / cached_lookups'
    prefix cache hit rate         prefix_cache_hit_tokens' / prefix_cache_queried_tokens'
    draft tokens overtaken        superseded' / (blocks' + superseded')     (of a draft)
    step time                     sum(step_seconds') / steps'
    share of a phase              step_seconds'{phase=p} / sum(step_seconds')
    tokens per second             committed'

`spec_decode_num_draft_tokens` counts what arrived; vLLM's counter of that name, which knows no
token that arrives and is not verified, is `spec_decode_num_verified_tokens` here.

Per choice, with n output tokens: TPOT = (E2E - TTFT) / (n - 1), which exists only for n >= 2.
"""

import re
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "ALL_METRICS",
    "CACHED_PROMPT_TOKENS",
    "CHOICES_FINISHED",
    "DRAFT_CONNECTED",
    "DRAFT_HOP",
    "DRAFT_KV_USAGE",
    "DRAFT_LABELS",
    "DRAFT_LINKS",
    "DRAFT_LOSSES",
    "DRAFT_OPEN_SEQUENCES",
    "DRAFT_READY",
    "DRAFT_ROUND_TRIP",
    "DRAFT_SEQUENCES",
    "DRAFT_STEP_SECONDS",
    "DRAFT_TOTALS",
    "ENGINE_CONNECTS",
    "ENGINE_FAILURES",
    "ENGINE_LABELS",
    "ENGINE_LOSSES",
    "ENGINE_STARTS",
    "ESTIMATED_SPEEDUP",
    "FORWARD_ROWS",
    "KV_USAGE",
    "NUM_ACCEPTED_PER_POS",
    "NUM_ACCEPTED_TOKENS",
    "NUM_CACHED_HITS",
    "NUM_CACHED_LOOKUPS",
    "NUM_COMMITTED_TOKENS",
    "NUM_DRAFTS",
    "NUM_DRAFT_TOKENS",
    "NUM_INVALID",
    "NUM_LATE",
    "NUM_LATE_LAWS",
    "NUM_MESSAGES_RECEIVED",
    "NUM_MESSAGES_SENT",
    "NUM_ROUNDS",
    "NUM_SPECULATIVE_STEPS",
    "NUM_STALE",
    "NUM_STEPS",
    "NUM_VERIFIED_PER_POS",
    "NUM_VERIFIED_TOKENS",
    "OUTPUT_TOKENS",
    "PREEMPTIONS",
    "PREFILL_TIME",
    "PREFIX_CACHE_HITS",
    "PREFIX_CACHE_QUERIED",
    "PROMPT_TOKENS",
    "QUEUE_TIME",
    "READY",
    "REQUESTS_FINISHED",
    "REQUESTS_REFUSED",
    "REQUESTS_RUNNING",
    "REQUESTS_STARTED",
    "REQUEST_DURATION",
    "REQUEST_LABELS",
    "RUNNING",
    "SEQUENCES_FAILED",
    "SEQUENCES_FINISHED",
    "SEQUENCES_LOST",
    "SEQUENCES_MOVED",
    "SPECULATION_MODE",
    "SPECULATION_REASON",
    "SPECULATION_SWITCHES",
    "STEP_SECONDS",
    "TIME_PER_OUTPUT_TOKEN",
    "TIME_TO_FIRST_TOKEN",
    "WAITING",
    "Metric",
    "MetricKind",
]

_NAME = re.compile(r"[a-z][a-z0-9_]*")

ENGINE_LABELS = ("model_name", "engine")
"""Labels of every engine metric. `engine`: a name that stays when the engine is rebuilt."""
REQUEST_LABELS = ("model_name", "router")
"""Labels of every router metric. `router`: the replica that counts."""
DRAFT_LABELS = ("model_name", "replica")
"""Labels of every draft metric. `model_name`: the draft's own; `replica`: the replica that counts."""


class MetricKind(Enum):
    """How values of a metric combine."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One definition. Raises `ValueError` when no exporter could take it."""

    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...] = ()
    """Every value carries exactly these."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.endswith("_total"):
            raise ValueError(f"name: {self.name!r} is not lower-case words joined by _, without _total")
        if (self.kind is MetricKind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"buckets: {self.name} needs them exactly if it is a histogram")
        if any(one <= 0 for one in self.buckets) or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets: those of {self.name} must be positive and increase")


def _engine(kind: MetricKind, name: str, description: str, *labels: str, buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(name=name, kind=kind, description=description, labels=ENGINE_LABELS + labels, buckets=buckets)


def _engine_counter(name: str, description: str, *labels: str) -> Metric:
    return _engine(MetricKind.COUNTER, name, description, *labels)


def _engine_gauge(name: str, description: str, *labels: str) -> Metric:
    return _engine(MetricKind.GAUGE, name, description, *labels)


def _draft(kind: MetricKind, name: str, description: str) -> Metric:
    return Metric(name=f"outrider_draft_{name}", kind=kind, description=description, labels=DRAFT_LABELS)


def _request_counter(name: str, description: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, description=description, labels=REQUEST_LABELS + labels)


def _seconds(name: str, description: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(
        name=name,
        kind=MetricKind.HISTOGRAM,
        description=f"{description}, seconds.",
        labels=REQUEST_LABELS + labels,
        buckets=buckets,
    )


# Speculation: totals of `SpeculationTotals`.
NUM_DRAFTS = _engine_counter("spec_decode_num_drafts", "Rounds that verified at least one draft token.")
NUM_DRAFT_TOKENS = _engine_counter("spec_decode_num_draft_tokens", "Usable draft tokens that arrived.")
NUM_VERIFIED_TOKENS = _engine_counter("spec_decode_num_verified_tokens", "Draft tokens that a step verified.")
NUM_ACCEPTED_TOKENS = _engine_counter("spec_decode_num_accepted_tokens", "Verified draft tokens that were committed.")
NUM_ACCEPTED_PER_POS = _engine_counter(
    "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position in the block.", "position"
)
NUM_VERIFIED_PER_POS = _engine_counter(
    "spec_decode_num_verified_tokens_per_pos", "Verified draft tokens by position in the block.", "position"
)
NUM_COMMITTED_TOKENS = _engine_counter("spec_decode_num_committed_tokens", "Tokens committed, plain rounds included.")
NUM_ROUNDS = _engine_counter("spec_decode_num_rounds", "Rounds over all sequences, plain ones included.")
NUM_LATE = _engine_counter("spec_decode_num_late", "Rounds that went on without a block which was on its way.")
NUM_CACHED_LOOKUPS = _engine_counter(
    "spec_decode_num_cached_lookups", "Outcomes looked up in a table that the draft had pushed (cached mode)."
)
NUM_CACHED_HITS = _engine_counter("spec_decode_num_cached_hits", "Look-ups that found their block: no round trip.")
NUM_STALE = _engine_counter("spec_decode_num_stale", "Blocks dropped since the text had moved elsewhere.")
NUM_LATE_LAWS = _engine_counter(
    "spec_decode_num_late_laws", "Blocks judged without their laws, which were late or of no use (rejection rule)."
)
NUM_INVALID = _engine_counter("spec_decode_num_invalid", "Malformed or out-of-range draft messages dropped.")
NUM_MESSAGES_SENT = _engine_counter("spec_decode_num_draft_messages_sent", "Messages sent to drafts.")
NUM_MESSAGES_RECEIVED = _engine_counter("spec_decode_num_draft_messages_received", "Messages received from drafts.")

# The engine.
NUM_STEPS = _engine_counter("outrider_engine_steps", "Engine steps.")
NUM_SPECULATIVE_STEPS = _engine_counter("outrider_engine_speculative_steps", "Steps that verified a draft token.")
STEP_SECONDS = _engine_counter("outrider_engine_step_seconds", "Seconds spent in each phase of the steps.", "phase")
FORWARD_ROWS = _engine_counter("outrider_engine_forward_rows", "Token rows of all forwards, prefill included.")
PREEMPTIONS = _engine_counter("outrider_engine_preemptions", "Sequences that lost their KV and were recomputed.")
PREFIX_CACHE_QUERIED = _engine_counter("outrider_prefix_cache_queried_tokens", "Prompt tokens looked up in the cache.")
PREFIX_CACHE_HITS = _engine_counter("outrider_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.")
SEQUENCES_FINISHED = _engine_counter("outrider_engine_sequences_finished", "Sequences that finished or were aborted.")
SEQUENCES_FAILED = _engine_counter("outrider_engine_sequences_failed", "Sequences that ended with an error.")
ENGINE_STARTS = _engine_counter("outrider_engine_starts", "Groups of ranks that were started: 1 + rebuilds.")
ENGINE_FAILURES = _engine_counter("outrider_engine_failures", "Groups of ranks that failed, at the start or later.")
RUNNING = _engine_gauge("outrider_engine_sequences_running", "Sequences in the batch.")
WAITING = _engine_gauge("outrider_engine_sequences_waiting", "Sequences that wait for admission.")
KV_USAGE = _engine_gauge("outrider_engine_kv_usage_ratio", "Share of KV blocks in use, 0 to 1.")
READY = _engine_gauge("outrider_engine_ready", "1 while the engine serves, 0 while it is rebuilt.")
SPECULATION_MODE = _engine_gauge("outrider_engine_speculation_mode", "1 for the mode in force, else 0.", "mode")
SPECULATION_REASON = _engine_gauge(
    "outrider_engine_speculation_reason", "1 for the reason of the mode in force, else 0.", "reason"
)
ESTIMATED_SPEEDUP = _engine_gauge(
    "outrider_engine_estimated_speedup_ratio", "Last estimate of the speed relative to plain decoding."
)
DRAFT_CONNECTED = _engine_gauge("outrider_draft_link_connected", "1 while the link to this draft is up.", "draft")
DRAFT_LOSSES = _engine_counter("outrider_draft_link_losses", "Times that a link to a draft broke.")
DRAFT_ROUND_TRIP = _engine_gauge(
    "outrider_draft_link_round_trip_seconds", "Recent time from verdict to proposal; 0 before the first.", "draft"
)
DRAFT_HOP = _engine(
    MetricKind.HISTOGRAM,
    "outrider_draft_link_hop_seconds",
    "One way to the draft: half of what a waited-for block took beside its drafting, seconds.",
    buckets=(0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
DRAFT_OPEN_SEQUENCES = _engine_gauge(
    "outrider_draft_link_open_sequences", "Sequences that this draft holds for the engine.", "draft"
)
SPECULATION_SWITCHES = _engine_counter(
    "outrider_engine_speculation_switches",
    "Times that speculation went on or off between two looks, about a second apart.",
)

# A draft, as it sees itself: `DraftReport`.
DRAFT_READY = _draft(MetricKind.GAUGE, "ready", "1 while the draft serves, 0 while it loads or after it failed.")
DRAFT_LINKS = _draft(MetricKind.GAUGE, "links", "Engines that are connected.")
DRAFT_SEQUENCES = _draft(MetricKind.GAUGE, "sequences", "Sequences held over all links.")
DRAFT_KV_USAGE = _draft(MetricKind.GAUGE, "kv_usage_ratio", "Share of KV blocks in use, 0 to 1.")
DRAFT_STEP_SECONDS = _draft(MetricKind.GAUGE, "step_seconds", "Recent mean of a draft step, forward and draw.")
DRAFT_TOTALS = {
    "steps": _draft(MetricKind.COUNTER, "steps", "Units of work: rounds of blocks or tables, chunks of prefill."),
    "rounds": _draft(MetricKind.COUNTER, "rounds", "Batches of blocks."),
    "blocks": _draft(MetricKind.COUNTER, "blocks", "Blocks sent."),
    "drafted_tokens": _draft(MetricKind.COUNTER, "drafted_tokens", "Tokens of the blocks sent."),
    "tables": _draft(MetricKind.COUNTER, "tables", "Outcome tables sent."),
    "outcomes": _draft(MetricKind.COUNTER, "outcomes", "Blocks in the tables sent."),
    "late_laws": _draft(MetricKind.COUNTER, "late_laws", "Blocks of tables whose laws were sent at their launch."),
    "adopted": _draft(MetricKind.COUNTER, "adopted", "Verdicts that met a branch."),
    "superseded": _draft(MetricKind.COUNTER, "superseded", "Blocks dropped before they were sent."),
    "prefill_tokens": _draft(MetricKind.COUNTER, "prefill_tokens", "Tokens run to catch up with a text."),
    "dropped_events": _draft(MetricKind.COUNTER, "dropped_events", "Events that matched nothing."),
    "resyncs": _draft(MetricKind.COUNTER, "resyncs", "Repairs asked for."),
    "drift": _draft(MetricKind.COUNTER, "drift", "Repairs asked for because a prefix hash did not match."),
    "refusals": _draft(MetricKind.COUNTER, "refusals", "Sequences refused."),
    "evictions": _draft(MetricKind.COUNTER, "evictions", "Sequences freed to make room, or idle too long."),
}
"""The draft's counters, by their names in `DraftReport.totals`."""

# Requests, as the router sees them.
TIME_TO_FIRST_TOKEN = _seconds(
    "gen_ai_server_time_to_first_token",
    "Arrival at the router to the first token",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    "traffic_class",
)
TIME_PER_OUTPUT_TOKEN = _seconds(
    "gen_ai_server_time_per_output_token",
    "(E2E - TTFT) / (n - 1) of each choice with n >= 2 output tokens",
    # The conventions begin at 10 ms; a speculating engine is quicker.
    (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    "traffic_class",
)
REQUEST_DURATION = _seconds(
    "gen_ai_server_request_duration",
    "Arrival at the router to the end",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36),
    "traffic_class",
    "outcome",
)
QUEUE_TIME = _seconds(
    "outrider_request_queue_seconds",
    "Arrival at the engine to admission into the batch, of each finished choice",
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    "traffic_class",
)
PREFILL_TIME = _seconds(
    "outrider_request_prefill_seconds",
    "Admission to the end of the prefill, of each finished choice",
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    "traffic_class",
)
REQUESTS_STARTED = _request_counter("outrider_requests_started", "Requests handed to an engine.", "traffic_class")
REQUESTS_FINISHED = _request_counter(
    "outrider_requests_finished",
    "Started requests that ended: completed, abandoned, or the error's class.",
    "traffic_class",
    "outcome",
)
REQUESTS_REFUSED = _request_counter("outrider_requests_refused", "Requests refused before they ran.", "error")
CHOICES_FINISHED = _request_counter(
    "outrider_choices_finished", "Choices that ended without an error.", "traffic_class", "finish_reason"
)
PROMPT_TOKENS = _request_counter("outrider_prompt_tokens", "Prompt tokens of started requests.", "traffic_class")
CACHED_PROMPT_TOKENS = _request_counter(
    "outrider_cached_prompt_tokens", "Prompt tokens that the prefix cache supplied.", "traffic_class"
)
OUTPUT_TOKENS = _request_counter("outrider_output_tokens", "Committed tokens handed to clients.", "traffic_class")
ENGINE_CONNECTS = _request_counter("outrider_router_engine_connects", "Sessions opened to engines.")
ENGINE_LOSSES = _request_counter("outrider_router_engine_losses", "Sessions to engines that broke.")
SEQUENCES_MOVED = _request_counter(
    "outrider_router_sequences_moved", "Sequences of a lost engine that went on on another one."
)
REQUESTS_RUNNING = Metric(
    name="outrider_requests_running",
    kind=MetricKind.GAUGE,
    description="Started requests that have not ended.",
    labels=REQUEST_LABELS,
)
SEQUENCES_LOST = _request_counter("outrider_router_sequences_lost", "Sequences that ran on a session that broke.")

ALL_METRICS: tuple[Metric, ...] = (
    *(one for one in list(vars().values()) if isinstance(one, Metric)),
    *DRAFT_TOTALS.values(),
)
"""Every definition of this module, for documents, dashboards and their checks."""

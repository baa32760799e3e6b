"""Messages between router and engine, as domain values. `rpc.dispatch_conversion` maps them."""

from dataclasses import dataclass, field
from enum import Enum

from outrider.core.fleet import PastError
from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest
from outrider.core.sequence import Finish
from outrider.core.speculation import SpeculationMode, SpeculationReason, SpeculationStats
from outrider.core.verdict import TokenLogprobs

__all__ = [
    "DraftLinkStatus",
    "EngineEvent",
    "EngineHello",
    "EngineReport",
    "EngineStatus",
    "ReportRequest",
    "RouterCommand",
    "SequenceAbort",
    "SequenceDelta",
    "SequenceEnd",
    "SequenceErrorCode",
    "SequenceFailure",
    "SequenceSubmit",
    "SpeculationOutcome",
    "SpeculationTotals",
    "Timings",
    "UpdateGate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSubmit:
    """Run a sequence; its events carry `stream_key`, which the router chose."""

    stream_key: int
    request: SequenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAbort:
    """End a sequence."""

    stream_key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGate:
    """New settings of the gate."""

    settings: GateSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """Ask for an `EngineReport` with the same nonce."""

    nonce: int


RouterCommand = SequenceSubmit | SequenceAbort | UpdateGate | ReportRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHello:
    """Who answers on a stream."""

    engine_id: str
    engine_epoch: int
    model: str
    max_model_len: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """Tokens that one step committed for one sequence."""

    stream_key: int
    first_token_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class SequenceErrorCode(Enum):
    """How a sequence failed."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFailure:
    """An error that ended a sequence; `message` names the field or the cause."""

    code: SequenceErrorCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds, measured on the engine from the arrival of the request."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOutcome:
    """What speculation did for one sequence."""

    mode: SpeculationMode = SpeculationMode.OFF
    reason: SpeculationReason = SpeculationReason.NOT_CONFIGURED
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    estimated_speedup: float | None = None
    """Relative to plain decoding on the same engine; None without an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnd:
    """The end of a sequence: exactly one of `finish` and `failure` is set."""

    stream_key: int
    finish: Finish | None = None
    failure: SequenceFailure | None = None
    cached_prompt_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    speculation: SpeculationOutcome = field(default_factory=SpeculationOutcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLinkStatus:
    """One link of an engine to a draft."""

    address: str
    connected: bool
    incarnation: int = 0
    open_sequences: int = 0
    problem: str = ""
    losses: int = 0
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationTotals:
    """Counters of one engine since it started. Raw; every rate is derived where it is shown."""

    steps: int = 0
    speculative_steps: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    draft_messages_sent: int = 0
    draft_messages_received: int = 0
    late: int = 0
    stale: int = 0
    invalid: int = 0
    late_laws: int = 0
    accepted_per_position: tuple[int, ...] = ()
    verified_per_position: tuple[int, ...] = ()
    forward_rows: int = 0
    preemptions: int = 0
    prefix_cache_queried_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    finished_sequences: int = 0
    failed_sequences: int = 0
    cached_lookups: int = 0
    cached_hits: int = 0
    step_seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds) pairs sorted by phase, summed over all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The state of one engine, for routers, operators and clients."""

    engine_id: str
    ready: bool
    problem: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    mode: SpeculationMode = SpeculationMode.OFF
    reason: SpeculationReason = SpeculationReason.NOT_CONFIGURED
    mean_num_draft_tokens: float = 0.0
    acceptance_rate: float | None = None
    estimated_speedup: float | None = None
    draft_links: tuple[DraftLinkStatus, ...] = ()
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)
    node: str = ""
    """Address of its node; empty where it is not known."""
    starts: int = 0
    """Incarnations so far: 1 + rebuilds; 0 where it is not known."""
    recent_errors: tuple[PastError, ...] = ()
    """Why earlier incarnations failed, latest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """An `EngineStatus`, asked for (nonce of the request) or not (0)."""

    status: EngineStatus
    nonce: int = 0


EngineEvent = EngineHello | SequenceDelta | SequenceEnd | EngineReport

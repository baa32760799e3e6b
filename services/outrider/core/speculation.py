"""What can be said about speculation: modes, rules, reasons, and the counters of one request."""

from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "ProposalSource",
    "SpeculationChoice",
    "SpeculationMode",
    "SpeculationPreference",
    "SpeculationReason",
    "SpeculationStats",
    "VerificationRule",
]


class SpeculationMode(Enum):
    """How the next round gets its proposal."""

    OFF = "off"
    SEQUENTIAL = "sequential"
    CACHED = "cached"


class VerificationRule(Enum):
    """How a drafted token is judged. Greedy is `COUPLED` at temperature 0 (zero noise)."""

    COUPLED = "coupled"
    REJECTION = "rejection"


class SpeculationPreference(Enum):
    """What the client asks for."""

    AUTO = "auto"
    OFF = "off"
    ON = "on"


class SpeculationReason(Enum):
    """Why speculation is on or off for a sequence in a step. Stable: metrics and clients use it."""

    ON = "on"
    NOT_CONFIGURED = "not_configured"
    OPERATOR_OFF = "operator_off"
    CLIENT_OFF = "client_off"
    BATCH_TOO_LARGE = "batch_too_large"
    LOW_ACCEPTANCE = "low_acceptance"
    TEMPERATURE = "temperature"
    DRAFT_UNAVAILABLE = "draft_unavailable"
    DRAFT_NOT_READY = "draft_not_ready"
    DRAFT_BUSY = "draft_busy"
    CONTEXT_TOO_LONG = "context_too_long"
    LAST_TOKEN = "last_token"
    DOES_NOT_PAY = "does_not_pay"
    NO_SPACE = "no_space"


class ProposalSource(Enum):
    """Who made a proposal."""

    DRAFT = "draft"
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationChoice:
    """The client's wishes for one request."""

    preference: SpeculationPreference = SpeculationPreference.AUTO
    max_tokens: int | None = None
    """Upper bound on draft tokens per round; None leaves it to the server."""
    rule: VerificationRule = VerificationRule.COUPLED


@dataclass(slots=True, kw_only=True)
class SpeculationStats:
    """Raw counters of one sequence. Rates are properties, never stored.

    Over the rounds of a sequence: committed = rounds + accepted - cut.
    """

    rounds: int = 0
    """Verify or plain decode steps that committed at least one token."""
    speculative_rounds: int = 0
    """Rounds that verified at least one drafted token."""
    drafted: int = 0
    """Usable draft tokens that arrived for this sequence, verified or not."""
    verified: int = 0
    """Draft tokens that took part in a verify step."""
    accepted: int = 0
    """Verified draft tokens that were committed; none behind the end of the sequence counts."""
    cut: int = 0
    """Rounds whose own target token fell behind the end of the sequence."""
    committed: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """Entry m counts the rounds in which draft position m was accepted."""
    verified_per_position: list[int] = field(default_factory=list)
    late: int = 0
    """Rounds that went on without a block because it had not arrived."""
    stale: int = 0
    """Blocks that arrived and were dropped, since the text had moved elsewhere."""
    late_laws: int = 0
    """Rounds whose block was judged without its laws: these were late or of no use (rejection rule)."""
    cached_hits: int = 0
    cached_lookups: int = 0
    forward_rows: int = 0
    """Rows of the decode and verify steps (1 + k each)."""

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / verified; None before the first verified token."""
        return self.accepted / self.verified if self.verified else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / speculative rounds (includes the extra token); None before the first."""
        return 1 + self.accepted / self.speculative_rounds if self.speculative_rounds else None

    @property
    def hit_rate(self) -> float | None:
        """Share of outcome-table lookups that hit; None without lookups."""
        return self.cached_hits / self.cached_lookups if self.cached_lookups else None

    def count_round(self, *, verified: int, accepted: int, committed: int) -> None:
        """Count one finished round: `verified` draft tokens judged, `accepted` of them committed.

        `accepted` already excludes tokens behind the end; `committed` is what the round added.
        """
        self.rounds += 1
        self.speculative_rounds += verified > 0
        self.verified += verified
        self.accepted += accepted
        self.committed += committed
        self.cut += 1 + accepted - committed
        self.forward_rows += 1 + verified
        for counts, length in ((self.verified_per_position, verified), (self.accepted_per_position, accepted)):
            counts.extend([0] * (verified - len(counts)))
            for m in range(length):
                counts[m] += 1

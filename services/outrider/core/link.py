"""Messages between target and draft, as domain values. `rpc.link_conversion` maps them to protobuf.

The meaning of each is in `protos/outrider/v1/speculation.proto`.
"""

from dataclasses import dataclass
from enum import Enum

from outrider.core.outcome_table import OutcomeEntry, OutcomeTable
from outrider.core.policy import RoundPlan
from outrider.core.proposal import BlockLaws, Proposal
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import ProposalSource, VerificationRule

__all__ = [
    "PROTOCOL_VERSION",
    "Busy",
    "Capability",
    "CloseSequence",
    "DraftEvent",
    "DraftProposal",
    "DraftStats",
    "Drain",
    "Evicted",
    "Features",
    "Goodbye",
    "Hello",
    "HelloAck",
    "Launch",
    "LaunchRow",
    "LinkDown",
    "LinkError",
    "LinkErrorCode",
    "LinkEvent",
    "LinkUp",
    "NeedResync",
    "OpenAck",
    "OpenNack",
    "OpenSequence",
    "OutcomeEntry",
    "OutcomeTable",
    "PauseSequences",
    "Ping",
    "Pong",
    "RefusalReason",
    "ResumeSequences",
    "Resync",
    "TargetEvent",
    "VerdictRow",
    "Verdicts",
    "capabilities",
]

PROTOCOL_VERSION = 1


class Capability(Enum):
    """Optional parts of the protocol that a side can do."""

    SEQUENTIAL = "sequential"
    CACHED = "cached"
    SPARSE_LAWS = "sparse_laws"
    FEATURES = "features"
    LATE_LAWS = "late_laws"
    PACKED_TABLES = "packed_tables"


def capabilities(*, stores_features: bool) -> frozenset[Capability]:
    """What a target can do; features only where its engine stores them."""
    return frozenset(Capability) if stores_features else frozenset(Capability) - {Capability.FEATURES}


class RefusalReason(Enum):
    """Why a draft does not hold a sequence."""

    NO_SPACE = "no_space"
    CONTEXT_TOO_LONG = "context_too_long"
    DRAINING = "draining"
    INVALID = "invalid"
    IDLE = "idle"


class LinkErrorCode(Enum):
    """Why a draft refuses or ends a link."""

    VERSION = "version"
    VOCABULARY = "vocabulary"
    MALFORMED = "malformed"
    UNAUTHENTICATED = "unauthenticated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a link: what has to agree."""

    engine_id: str
    engine_epoch: int
    link_id: int
    target_model: str
    vocab_size: int
    """Valid token ids are below this."""
    tokenizer_fingerprint: bytes
    max_num_draft_tokens: int
    max_model_len: int
    max_num_seqs: int
    capabilities: frozenset[Capability] = capabilities(stores_features=False)
    auth_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequence:
    """Open a sequence with the text committed so far."""

    handle: int
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    noise_key: int
    rule: VerificationRule
    eos_token_ids: tuple[int, ...] = ()
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """Replace the draft's text from `first_position` on."""

    handle: int
    first_position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """Outcome of one round of one sequence, and the plan for the next."""

    handle: int
    base_len: int
    block_id: int
    """The judged block; 0 when it was not the draft's."""
    num_accepted: int
    next_token_id: int
    accepted_token_ids: tuple[int, ...] = ()
    """The accepted ids when the judged block was not the draft's."""
    prefix_hash: int
    """Of the committed text after the round."""
    plan: RoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Outcomes of one engine step."""

    step: int
    rows: tuple[VerdictRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRow:
    """What a starting verify step has in flight for one sequence."""

    handle: int
    base_len: int
    block_id: int
    """The draft's block; 0 when it is not the draft's, or none is here. One that is here but not in flight has
    `num_used` 0."""
    num_used: int
    num_arrived: int = 0
    """Tokens of the named block that were here when the step started; 0 where the target does not say."""
    source: ProposalSource | None
    token_ids: tuple[int, ...] = ()
    """The ids when the block is not the draft's."""
    ahead: RoundPlan
    """Blocks wanted for the outcomes: K and the branch budget; mode OFF wants none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A verify step starts; it ends in about `budget_us` microseconds."""

    step: int
    rows: tuple[LaunchRow, ...]
    budget_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSequence:
    """Free a sequence."""

    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseSequences:
    """Stop drafting, keep the KV."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSequences:
    """Draft again."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Liveness."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The target leaves; the draft frees everything of the link."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the target's layers said about committed rows, for a draft that reads it."""

    handle: int
    first_position: int
    num_rows: int
    payload: bytes
    """Rows of equal size, as the draft method defines them."""


TargetEvent = (
    OpenSequence
    | Resync
    | Verdicts
    | Launch
    | CloseSequence
    | PauseSequences
    | ResumeSequences
    | Ping
    | Goodbye
    | Features
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloAck:
    """The draft's answer to Hello."""

    incarnation: int
    draft_model: str
    vocab_size: int
    tokenizer_fingerprint: bytes
    max_model_len: int
    kv_capacity_tokens: int
    step_ms: float
    capabilities: frozenset[Capability]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAck:
    """The draft holds the text of a sequence up to `have_len`."""

    handle: int
    have_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNack:
    """The draft refuses a sequence."""

    handle: int
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedResync:
    """The draft's text agrees only up to `have_len`."""

    handle: int
    have_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The draft freed a sequence by itself."""

    handle: int
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProposal:
    """A block for one sequence."""

    handle: int
    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """Health of the draft, for this link."""

    open_sequences: int
    kv_usage: float
    step_ms: float
    queued_rows: int
    drift_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Plan no drafting for this long."""

    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The draft is leaving."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkError:
    """The draft refuses or ends the link."""

    code: LinkErrorCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Liveness."""

    nonce: int


DraftEvent = (
    HelloAck
    | OpenAck
    | OpenNack
    | NeedResync
    | Evicted
    | DraftProposal
    | OutcomeTable
    | BlockLaws
    | DraftStats
    | Busy
    | Drain
    | LinkError
    | Pong
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """From the transport: a link is established and greeted."""

    link_id: int
    address: str
    hello: HelloAck


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """From the transport: the link is lost; nothing of it can be trusted any more."""

    link_id: int
    cause: str


LinkEvent = LinkUp | LinkDown | DraftEvent
"""What the engine loop receives from a transport, in order."""

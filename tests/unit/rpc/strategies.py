"""Hypothesis strategies for every value that crosses a wire. Floats are exact in their field's type."""

from hypothesis import strategies as st

from outrider.core import dispatch, fleet, generation, link
from outrider.core.policy import ClassPolicy, GateSettings, RoundPlan
from outrider.core.proposal import BlockLaws, Proposal, SparseLaw
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Finish, FinishReason
from outrider.core.speculation import (
    ProposalSource,
    SpeculationChoice,
    SpeculationMode,
    SpeculationPreference,
    SpeculationReason,
    SpeculationStats,
    VerificationRule,
)
from outrider.core.verdict import TokenLogprobs

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = st.lists(u32, max_size=6).map(tuple)
counts = st.lists(u32, max_size=6)
text = st.text(max_size=12)  # without surrogates, as in every str that came from UTF-8
f64 = st.floats(allow_nan=False, allow_infinity=False)
f32 = st.floats(-1e6, 1e6, width=32)
share = st.floats(0, 1)
seconds = st.integers(0, 2**31).map(lambda n: n / 1024)  # exact in milliseconds too
milliseconds = st.integers(0, 2**32 - 1).map(lambda n: n / 1e3)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


def f32_in(low: float, high: float, *, low_open: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, exclude_min=low_open)


biases = st.dictionaries(u32, f32_in(-100, 100), max_size=4).map(lambda bias: tuple(sorted(bias.items())))

samplings = st.builds(
    SamplingParams,
    temperature=f32_in(0, 100),
    top_k=u32,
    top_p=f32_in(0, 1, low_open=True),
    min_p=f32_in(0, 1),
    repetition_penalty=f32_in(0, 10, low_open=True),
    frequency_penalty=f32_in(-2, 2),
    presence_penalty=f32_in(-2, 2),
    logit_bias=biases,
    min_tokens=u32,
    suppressed_token_ids=ids,
)
double_samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-6, 10),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(u32, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(bias.items())),
)
choices = st.builds(
    SpeculationChoice,
    preference=st.sampled_from(SpeculationPreference),
    max_tokens=maybe(u32),
    rule=st.sampled_from(VerificationRule),
)
stats = st.builds(
    SpeculationStats,
    rounds=u32,
    speculative_rounds=u32,
    drafted=u32,
    verified=u32,
    accepted=u32,
    cut=u32,
    committed=u32,
    accepted_per_position=counts,
    verified_per_position=counts,
    late=u32,
    stale=u32,
    late_laws=u32,
    cached_hits=u32,
    cached_lookups=u32,
    forward_rows=u32,
)
outcomes = st.builds(
    dispatch.SpeculationOutcome,
    mode=st.sampled_from(SpeculationMode),
    reason=st.sampled_from(SpeculationReason),
    stats=stats,
    estimated_speedup=maybe(f64),
)
timings = st.builds(dispatch.Timings, queue_s=seconds, prefill_s=seconds, first_token_s=seconds, total_s=seconds)
token_logprobs = st.builds(TokenLogprobs, logprob=f32, top=st.lists(st.tuples(u32, f32), max_size=3).map(tuple))
finishes = st.one_of(
    st.builds(Finish, reason=st.sampled_from(FinishReason)),
    st.builds(Finish, reason=st.just(FinishReason.STOP), stop_string_index=st.integers(0, 3)),
    st.builds(Finish, reason=st.just(FinishReason.STOP), stop_token_id=u32),
)


@st.composite
def tokens_with_logprobs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    token_ids = draw(ids)
    wanted = draw(st.booleans())
    return token_ids, tuple(draw(token_logprobs) for _ in token_ids) if wanted else ()


# --- the link --------------------------------------------------------------------------------

capabilities = st.frozensets(st.sampled_from(link.Capability))
hellos = st.builds(
    link.Hello,
    engine_id=text,
    engine_epoch=u64,
    link_id=u64,
    target_model=text,
    vocab_size=u32,
    tokenizer_fingerprint=st.binary(max_size=32),
    max_num_draft_tokens=u32,
    max_model_len=u32,
    max_num_seqs=u32,
    capabilities=capabilities,
    auth_token=text,
)
long_ids = st.one_of(ids, st.integers(1, 10_000).map(lambda n: tuple(range(n))))


@st.composite
def open_sequences(draw: st.DrawFn) -> link.OpenSequence:
    token_ids = draw(long_ids)
    return link.OpenSequence(
        handle=draw(u64),
        token_ids=token_ids,
        prompt_len=draw(st.integers(0, len(token_ids))),
        sampling=draw(samplings),
        noise_key=draw(u64),
        rule=draw(st.sampled_from(VerificationRule)),
        eos_token_ids=draw(ids),
        traceparent=draw(text),
    )


plans = st.builds(
    RoundPlan,
    mode=st.sampled_from(SpeculationMode),
    num_draft_tokens=u32,
    reason=st.sampled_from(SpeculationReason),
    branch_budget=u32,
)


@st.composite
def verdict_rows(draw: st.DrawFn) -> link.VerdictRow:
    accepted = draw(ids)
    return link.VerdictRow(
        handle=draw(u64),
        base_len=draw(u32),
        block_id=draw(u64),
        num_accepted=len(accepted) if accepted else draw(u32),
        next_token_id=draw(u32),
        accepted_token_ids=accepted,
        prefix_hash=draw(u32),
        plan=draw(plans),
    )


@st.composite
def launch_rows(draw: st.DrawFn) -> link.LaunchRow:
    token_ids = draw(ids)
    return link.LaunchRow(
        handle=draw(u64),
        base_len=draw(u32),
        block_id=draw(u64),
        num_used=len(token_ids) if token_ids else draw(u32),
        num_arrived=draw(u32),
        source=draw(st.none() | st.sampled_from(ProposalSource)),
        token_ids=token_ids,
        ahead=draw(plans),
    )


handles = st.lists(u64, max_size=4).map(tuple)
target_events: st.SearchStrategy[link.TargetEvent] = st.one_of(
    open_sequences(),
    st.builds(link.Resync, handle=u64, first_position=st.integers(0, 2**20), token_ids=long_ids),
    st.builds(link.Verdicts, step=u64, rows=st.lists(verdict_rows(), max_size=3).map(tuple)),
    st.builds(link.Launch, step=u64, rows=st.lists(launch_rows(), max_size=3).map(tuple), budget_us=u32),
    st.builds(link.CloseSequence, handle=u64),
    st.builds(link.PauseSequences, handles=handles),
    st.builds(link.ResumeSequences, handles=handles),
    st.builds(link.Ping, nonce=u64),
    st.builds(link.Goodbye, reason=text),
    st.integers(1, 3).flatmap(
        lambda rows: st.builds(
            link.Features,
            handle=u64,
            first_position=st.integers(0, 2**31),
            num_rows=st.just(rows),
            payload=st.integers(1, 4).flatmap(lambda size: st.binary(min_size=rows * size, max_size=rows * size)),
        )
    ),
)


@st.composite
def laws(draw: st.DrawFn) -> SparseLaw:
    pairs = draw(st.lists(st.tuples(u32, f32_in(0, 1)), max_size=3))
    return SparseLaw(token_ids=tuple(one for one, _ in pairs), probs=tuple(prob for _, prob in pairs))


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    token_ids = draw(ids)
    with_laws = draw(st.booleans())
    return Proposal(
        base_len=draw(u32),
        block_id=draw(st.integers(1, 2**64 - 1)),
        token_ids=token_ids,
        source=ProposalSource.DRAFT,
        laws=tuple(draw(laws()) for _ in token_ids) if with_laws else (),
    )


@st.composite
def tables(draw: st.DrawFn) -> link.OutcomeTable:
    base_len = draw(st.integers(0, 2**31))
    with_laws = draw(st.booleans())
    entries = []
    for _ in range(draw(st.integers(0, 4))):
        accepted, token_ids = draw(st.integers(0, 2**31 - 2)), draw(ids)
        block = Proposal(
            base_len=base_len + accepted + 1,
            block_id=draw(st.integers(1, 2**64 - 1)),
            token_ids=token_ids,
            source=ProposalSource.DRAFT,
            laws=tuple(draw(laws()) for _ in token_ids) if with_laws else (),
        )
        entries.append(link.OutcomeEntry(num_accepted=accepted, next_token_id=draw(u32), proposal=block))
    return link.OutcomeTable.of(draw(u64), base_len, draw(u64), entries, draw(st.booleans()))


acks = st.builds(
    link.HelloAck,
    incarnation=u64,
    draft_model=text,
    vocab_size=u32,
    tokenizer_fingerprint=st.binary(max_size=32),
    max_model_len=u32,
    kv_capacity_tokens=u64,
    step_ms=f64,
    capabilities=capabilities,
)
draft_events: st.SearchStrategy[link.DraftEvent] = st.one_of(
    acks,
    st.builds(link.OpenAck, handle=u64, have_len=u32),
    st.builds(link.OpenNack, handle=u64, reason=st.sampled_from(link.RefusalReason), detail=text),
    st.builds(link.NeedResync, handle=u64, have_len=u32),
    st.builds(link.Evicted, handle=u64, reason=st.sampled_from(link.RefusalReason)),
    st.builds(link.DraftProposal, handle=u64, proposal=proposals()),
    tables(),
    st.builds(
        BlockLaws,
        handle=u64,
        base_len=u32,
        block_id=st.integers(1, 2**64 - 1),
        laws=st.lists(laws(), max_size=4).map(tuple),
    ),
    st.builds(link.DraftStats, open_sequences=u32, kv_usage=f64, step_ms=f64, queued_rows=u32, drift_total=u64),
    st.builds(link.Busy, retry_after_s=milliseconds),
    st.builds(link.Drain, reason=text),
    st.builds(link.LinkError, code=st.sampled_from(link.LinkErrorCode), message=text),
    st.builds(link.Pong, nonce=u64),
)

# --- dispatch --------------------------------------------------------------------------------

stops = st.builds(
    StopConditions,
    max_tokens=st.integers(1, 2**32 - 1),
    min_tokens=u32,
    eos_token_ids=ids,
    token_ids=ids,
    strings=st.lists(text, max_size=3).map(tuple),
    skip_special_tokens=st.booleans(),
)
sequence_requests = st.builds(
    SequenceRequest,
    request_id=text,
    choice_index=u32,
    prompt_token_ids=st.lists(u32, min_size=1, max_size=6).map(tuple),
    resume_token_ids=ids,
    sampling=samplings,
    stop=stops,
    noise_key=u64,
    key_id=text,
    top_logprobs=maybe(u32),
    speculation=choices,
    priority=st.integers(-(2**31), 2**31 - 1),
    traffic_class=text,
    timeout_s=maybe(milliseconds),
    traceparent=text,
)
gate_settings = st.builds(
    GateSettings,
    preference=st.sampled_from(SpeculationPreference),
    max_num_draft_tokens=u32,
    batch_size_threshold=maybe(u32),
    batch_size_hysteresis=u32,
    min_acceptance_rate=share,
    max_temperature=maybe(st.floats(0, 1e6)),
    probe_interval_rounds=st.integers(1, 2**32 - 1),
    mode=st.sampled_from((None, SpeculationMode.SEQUENTIAL, SpeculationMode.CACHED)),
    max_branches=st.integers(1, 2**32 - 1),
    classes=st.lists(
        st.builds(
            ClassPolicy,
            traffic_class=st.text(min_size=1, max_size=12),
            preference=maybe(st.sampled_from(SpeculationPreference)),
            max_num_draft_tokens=maybe(u32),
        ),
        max_size=3,
        unique_by=lambda one: one.traffic_class,
    ).map(tuple),
)
commands: st.SearchStrategy[dispatch.RouterCommand] = st.one_of(
    st.builds(dispatch.SequenceSubmit, stream_key=u64, request=sequence_requests),
    st.builds(dispatch.SequenceAbort, stream_key=u64),
    st.builds(dispatch.UpdateGate, settings=gate_settings),
    st.builds(dispatch.ReportRequest, nonce=u64),
)
link_statuses = st.builds(
    dispatch.DraftLinkStatus,
    address=text,
    connected=st.booleans(),
    incarnation=u64,
    open_sequences=u32,
    problem=text,
    losses=u64,
    round_trip_s=seconds,
)
position_totals = st.lists(u64, max_size=4).map(tuple)
totals = st.builds(
    dispatch.SpeculationTotals,
    steps=u64,
    speculative_steps=u64,
    rounds=u64,
    drafted=u64,
    verified=u64,
    accepted=u64,
    committed=u64,
    draft_messages_sent=u64,
    draft_messages_received=u64,
    late=u64,
    stale=u64,
    invalid=u64,
    late_laws=u64,
    accepted_per_position=position_totals,
    verified_per_position=position_totals,
    forward_rows=u64,
    preemptions=u64,
    prefix_cache_queried_tokens=u64,
    prefix_cache_hit_tokens=u64,
    finished_sequences=u64,
    failed_sequences=u64,
    cached_lookups=u64,
    cached_hits=u64,
    step_seconds=st.dictionaries(st.sampled_from(("commit", "forward", "wait")), st.floats(0, 1e9)).map(
        lambda seconds: tuple(sorted(seconds.items()))
    ),
)
past_errors = st.lists(st.builds(fleet.PastError, text=text, age_s=seconds), max_size=2).map(tuple)
statuses = st.builds(
    dispatch.EngineStatus,
    engine_id=text,
    ready=st.booleans(),
    problem=text,
    running=u32,
    waiting=u32,
    kv_usage=f64,
    mode=st.sampled_from(SpeculationMode),
    reason=st.sampled_from(SpeculationReason),
    mean_num_draft_tokens=f64,
    acceptance_rate=maybe(f64),
    estimated_speedup=maybe(f64),
    draft_links=st.lists(link_statuses, max_size=2).map(tuple),
    totals=totals,
    node=text,
    starts=u64,
    recent_errors=past_errors,
)
fleets = st.builds(
    fleet.FleetStatus,
    nodes=st.lists(st.builds(fleet.NodeStatus, address=text, alive=st.booleans(), cpus=f64, gpus=f64), max_size=2).map(
        tuple
    ),
    deployments=st.lists(
        st.builds(fleet.DeploymentStatus, name=text, state=text, running=u32, other=u32, message=text), max_size=2
    ).map(tuple),
    recent_errors=past_errors,
)


@st.composite
def deltas(draw: st.DrawFn) -> dispatch.SequenceDelta:
    token_ids, logprobs = draw(tokens_with_logprobs())
    return dispatch.SequenceDelta(
        stream_key=draw(u64), first_token_index=draw(u32), token_ids=token_ids, logprobs=logprobs
    )


failures = st.builds(dispatch.SequenceFailure, code=st.sampled_from(dispatch.SequenceErrorCode), message=text)
ends = st.one_of(
    st.builds(
        dispatch.SequenceEnd,
        stream_key=u64,
        finish=finishes,
        cached_prompt_tokens=u32,
        timings=timings,
        speculation=outcomes,
    ),
    st.builds(dispatch.SequenceEnd, stream_key=u64, failure=failures),
)
engine_events: st.SearchStrategy[dispatch.EngineEvent] = st.one_of(
    st.builds(
        dispatch.EngineHello,
        engine_id=text,
        engine_epoch=u64,
        model=text,
        max_model_len=u32,
        kv_capacity_tokens=u32,
    ),
    deltas(),
    ends,
    st.builds(dispatch.EngineReport, status=statuses, nonce=u64),
)

# --- the public API --------------------------------------------------------------------------

chat = st.lists(st.builds(generation.ChatMessage, role=text, content=text), max_size=3).map(tuple)


@st.composite
def generation_requests(draw: st.DrawFn) -> generation.GenerationRequest:
    kind = draw(st.sampled_from(["text", "messages", "token_ids", "nothing"]))
    return generation.GenerationRequest(
        request_id=draw(text),
        model=draw(text),
        text=draw(text) if kind == "text" else None,
        messages=draw(chat) if kind == "messages" else None,
        continue_final_message=kind == "messages" and draw(st.booleans()),
        token_ids=draw(ids) if kind == "token_ids" else None,
        resume_token_ids=draw(ids),
        max_tokens=draw(st.none() | u32),
        min_tokens=draw(u32),
        ignore_eos=draw(st.booleans()),
        temperature=draw(st.none() | f32),
        top_p=draw(st.none() | f32),
        top_k=draw(st.none() | u32),
        min_p=draw(st.none() | f32),
        repetition_penalty=draw(st.none() | f32),
        frequency_penalty=draw(st.none() | f32),
        presence_penalty=draw(st.none() | f32),
        logit_bias=draw(biases),
        stop=tuple(draw(st.lists(text, max_size=3))),
        stop_token_ids=draw(ids),
        include_stop_str=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        seed=draw(st.none() | u64),
        n=draw(st.none() | u32),
        top_logprobs=draw(st.none() | u32),
        constraint=draw(st.sampled_from([None, "json_schema", "regex", "grammar"])),
        adapter=draw(text),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        traffic_class=draw(text),
        timeout_ms=draw(st.none() | u32),
        speculation=draw(choices),
    )


STOP_STRINGS = ("a", "b", "ab", "")


@st.composite
def text_deltas(draw: st.DrawFn) -> generation.TextDelta:
    token_ids, logprobs = draw(tokens_with_logprobs())
    return generation.TextDelta(
        choice_index=draw(u32),
        first_token_index=draw(u32),
        text=draw(text),
        token_ids=token_ids,
        logprobs=logprobs,
        seed=draw(u64),
    )


@st.composite
def choice_ends(draw: st.DrawFn) -> generation.ChoiceEnd:
    finish = draw(finishes)
    index = finish.stop_string_index
    return generation.ChoiceEnd(
        choice_index=draw(u32),
        finish=finish,
        stop_string=None if index is None else STOP_STRINGS[index],
        usage=generation.Usage(prompt_tokens=draw(u32), completion_tokens=draw(u32), cached_prompt_tokens=draw(u32)),
        timings=draw(timings),
        speculation=draw(outcomes),
    )


generation_events: st.SearchStrategy[generation.GenerationEvent] = st.one_of(
    st.builds(generation.GenerationAccepted, request_id=text, model=text, seed=u64, prompt_tokens=u32),
    text_deltas(),
    choice_ends(),
)
models = st.builds(
    generation.ModelDescription,
    model=text,
    max_model_len=u32,
    vocab_size=u32,
    eos_token_ids=ids,
    max_num_speculative_tokens=u32,
    max_choices=u32,
    max_top_logprobs=u32,
    unsupported_fields=st.lists(text, max_size=3).map(tuple),
    server_version=text,
)

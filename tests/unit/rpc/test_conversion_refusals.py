"""Malformed messages are refused by an error that names the field."""

from collections.abc import Callable

import pytest
from google.protobuf import text_format

from outrider.core import link
from outrider.core.errors import InvalidRequest, OutriderError, ProtocolError
from outrider.core.generation import GenerationRequest
from outrider.core.proposal import Proposal
from outrider.core.speculation import ProposalSource, SpeculationChoice
from outrider.rpc import dispatch_conversion, generation_conversion
from outrider.rpc.link_conversion import LinkIdentity, LinkReader, LinkWriter
from outrider.rpc.link_draft_conversion import draft_event_from_proto
from outrider.rpc.link_target_conversion import target_event_from_proto
from outrider.rpc.token_chunks import TextAssembler
from outrider.v1 import dispatch_pb2, generation_pb2, speculation_pb2

IDENTITY = LinkIdentity(link_id=7, engine_epoch=3, draft_incarnation=5)


def target_event(text: str) -> speculation_pb2.TargetEvent:
    return text_format.Parse(text, speculation_pb2.TargetEvent())


def draft_event(text: str) -> speculation_pb2.DraftEvent:
    return text_format.Parse(text, speculation_pb2.DraftEvent())


def command(text: str) -> dispatch_pb2.RouterCommand:
    return text_format.Parse(text, dispatch_pb2.RouterCommand())


def engine_event(text: str) -> dispatch_pb2.EngineEvent:
    return text_format.Parse(text, dispatch_pb2.EngineEvent())


OPEN = "rule: VERIFICATION_RULE_COUPLED sampling { temperature: 1 top_p: 1 repetition_penalty: 1 }"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "event"),
        ("hello {}", "event"),
        ("features { handle: 1 }", "features.payload"),
        (f"open_sequence {{ {OPEN} prompt_len: 2 text {{ last: true token_ids: 1 }} }}", "open_sequence.prompt_len"),
        ("open_sequence { text { last: true } }", "open_sequence.rule"),
        ("open_sequence { rule: 9 text { last: true } }", "open_sequence.sampling.top_p"),
        ("open_sequence { rule: 1 text { last: true } }", "open_sequence.sampling.top_p"),
        (f"open_sequence {{ {OPEN} text {{ last: true chunk_index: 1 }} }}", "open_sequence.text"),
        (f"open_sequence {{ {OPEN} text {{ last: true first_position: 1 }} }}", "open_sequence.text"),
        ("resync { text { chunk_index: 1 last: true } }", "resync.text.chunk_index"),
        ("verdicts { rows { plan { reason: 1 } } }", "verdicts.rows.plan.mode"),
        ("verdicts { rows { plan { mode: 77 reason: 1 } } }", "verdicts.rows.plan.mode"),
        ("verdicts { rows { plan { mode: 1 } } }", "verdicts.rows.plan.reason"),
        ("verdicts { rows { num_accepted: 3 accepted_token_ids: 1 } }", "verdicts.rows.accepted_token_ids"),
        ("launch { rows { source: 9 } }", "launch.rows.source"),
        ("launch { rows { num_used: 3 token_ids: 1 } }", "launch.rows.token_ids"),
    ],
)
def test_target_event(text: str, field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"^{field}:"):
        target_event_from_proto(target_event(text), TextAssembler(100))


COLUMNS = "num_accepted: 0 next_token_ids: 4 block_ids: 7 block_lens: 2 token_ids: [5, 6]"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "event"),
        ("open_nack { handle: 1 }", "open_nack.reason"),
        ("evicted { reason: 99 }", "evicted.reason"),
        ("error {}", "error.code"),
        ("proposal { token_ids: 1 }", "proposal.block_id"),
        ("proposal { block_id: 1 token_ids: [1, 2] laws {} }", "proposal.laws"),
        ("proposal { block_id: 1 token_ids: 1 laws { token_ids: 1 } }", "proposal.laws"),
        ("proposal { block_id: 1 token_ids: 1 laws { token_ids: 1 probs: nan } }", "proposal.laws.probs"),
        ("proposal { block_id: 1 token_ids: 1 laws { token_ids: 1 probs: 1.5 } }", "proposal.laws.probs"),
        (
            "outcome_table { handle: 1 entries { proposal { handle: 2 block_id: 1 } } }",
            "outcome_table.entries.proposal.handle",
        ),
        ("outcome_table { handle: 1 entries { proposal { handle: 1 } } }", "outcome_table.entries.proposal.block_id"),
        (
            "outcome_table { base_len: 5 entries { num_accepted: 2 proposal { block_id: 1 base_len: 7 } } }",
            "outcome_table.entries.proposal.base_len",
        ),
        (
            "outcome_table { entries { proposal { base_len: 1 block_id: 1 token_ids: 1 } } entries { proposal {"
            "base_len: 1 block_id: 2 token_ids: 1 laws { token_ids: 1 probs: 1 } } } }",
            "outcome_table.entries.proposal.laws",
        ),
        (f"outcome_table {{ {COLUMNS} entries {{ proposal {{ block_id: 1 }} }} }}", "outcome_table.entries"),
        (f"outcome_table {{ {COLUMNS} num_accepted: 1 }}", "outcome_table.num_accepted"),
        (f"outcome_table {{ {COLUMNS} next_token_ids: 1 }}", "outcome_table.next_token_ids"),
        (f"outcome_table {{ {COLUMNS} block_lens: 1 }}", "outcome_table.block_lens"),
        (f"outcome_table {{ {COLUMNS} block_ids: 8 }}", "outcome_table.num_accepted"),
        (f"outcome_table {{ {COLUMNS} token_ids: 5 }}", "outcome_table.token_ids"),
        ("outcome_table { token_ids: 5 }", "outcome_table.token_ids"),
        (
            "outcome_table { num_accepted: 0 next_token_ids: 4 block_ids: 1 block_lens: 4294967295 token_ids: 5 }",
            "outcome_table.token_ids",
        ),
        (
            "outcome_table { num_accepted: 0 next_token_ids: 4 block_ids: 0 block_lens: 1 token_ids: 5 }",
            "outcome_table.block_ids",
        ),
        (f"outcome_table {{ {COLUMNS} laws {{ token_ids: 5 probs: 1 }} }}", "outcome_table.laws"),
        (f"outcome_table {{ {COLUMNS} laws {{}} laws {{ token_ids: 5 }} }}", "outcome_table.laws"),
        (f"outcome_table {{ {COLUMNS} laws {{}} laws {{ token_ids: 5 probs: nan }} }}", "outcome_table.laws.probs"),
        ("block_laws { handle: 1 laws { token_ids: 1 probs: 1 } }", "block_laws.block_id"),
        ("block_laws { block_id: 1 laws { token_ids: [1, 2] probs: 1 } }", "block_laws.laws"),
        ("block_laws { block_id: 1 laws { token_ids: 1 probs: nan } }", "block_laws.laws.probs"),
        ("block_laws { block_id: 1 laws { token_ids: 1 probs: -0.5 } }", "block_laws.laws.probs"),
    ],
)
def test_draft_event(text: str, field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"^{field}:"):
        draft_event_from_proto(draft_event(text))


@pytest.mark.parametrize(
    "outcomes",
    [
        COLUMNS,
        "entries { next_token_id: 4 proposal { handle: 1 base_len: 10 block_id: 7 token_ids: [5, 6] } }",
    ],
)
def test_either_form_of_a_table_is_read(outcomes: str) -> None:
    """As they lie on the wire, by field name: the columns, and what a draft writes that does not know them."""
    event = draft_event_from_proto(draft_event(f"outcome_table {{ handle: 1 base_len: 9 last: true {outcomes} }}"))
    assert isinstance(event, link.OutcomeTable)
    block = Proposal(base_len=10, block_id=7, token_ids=(5, 6), source=ProposalSource.DRAFT)
    assert event == link.OutcomeTable.of(1, 9, 0, [link.OutcomeEntry(num_accepted=0, next_token_id=4, proposal=block)])
    assert event.find(0, 4) == event.block(7) == block
    assert event.find(0, 5) is event.find(1, 4) is event.block(8) is None


SUBMIT = "prompt_token_ids: 1 max_tokens: 1 sampling { top_p: 1 repetition_penalty: 1 }"


@pytest.mark.parametrize(
    ("text", "field", "error"),
    [
        ("", "command", ProtocolError),
        ("hello {}", "command", ProtocolError),
        ("submit { max_tokens: 1 }", "prompt_token_ids", InvalidRequest),
        ("submit { prompt_token_ids: 1 }", "max_tokens", InvalidRequest),
        ("submit { prompt_token_ids: 1 max_tokens: 1 }", "top_p", InvalidRequest),
        (f"submit {{ {SUBMIT} ignore_eos: true eos_token_ids: 2 }}", "eos_token_ids", InvalidRequest),
        (f"submit {{ {SUBMIT} speculation {{ preference: 9 }} }}", "speculation.preference", InvalidRequest),
        (f"submit {{ {SUBMIT} speculation {{ rule: 9 }} }}", "speculation.rule", InvalidRequest),
        ("gate_settings { probe_interval_rounds: 0 }", "gate_settings", ProtocolError),
        ("gate_settings { probe_interval_rounds: 1 preference: 12 }", "gate_settings.preference", ProtocolError),
    ],
)
def test_router_command(text: str, field: str, error: type[OutriderError]) -> None:
    with pytest.raises(error, match=rf"^{field}:"):
        dispatch_conversion.command_from_proto(command(text))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "event"),
        ("hello { protocol_version: 2 }", "hello.protocol_version"),
        ("end { }", "end.finish_reason"),
        ("end { finish_reason: FINISH_REASON_STOP error_code: SEQUENCE_ERROR_CODE_INVALID }", "end.finish_reason"),
        ("end { finish_reason: 9 }", "end.finish_reason"),
        ("end { error_code: 9 }", "end.error_code"),
        ("end { finish_reason: FINISH_REASON_STOP }", "end.speculation.mode"),
        ("delta { token_ids: [1, 2] logprobs { token_id: 1 } }", "delta.logprobs"),
        ("delta { token_ids: 1 logprobs { token_id: 2 } }", "delta.logprobs"),
        ("report { status { mode: 9 } }", "report.status.mode"),
    ],
)
def test_engine_event(text: str, field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"^{field}:"):
        dispatch_conversion.event_from_proto(engine_event(text))


def test_a_chunk_is_missing() -> None:
    assembler = TextAssembler(100)
    opening = target_event(f"open_sequence {{ handle: 1 {OPEN} text {{ token_ids: 1 }} }}")
    assert target_event_from_proto(opening, assembler) is None
    late = target_event("resync { handle: 1 text { chunk_index: 2 first_position: 1 last: true } }")
    with pytest.raises(ProtocolError, match=r"resync.text.chunk_index: 2 arrived where 1 is next"):
        target_event_from_proto(late, assembler)


def test_a_chunk_does_not_follow_the_last_one() -> None:
    assembler = TextAssembler(100)
    first = target_event("resync { handle: 1 text { first_position: 5 token_ids: [1, 2] } }")
    assert target_event_from_proto(first, assembler) is None
    gap = target_event("resync { handle: 1 text { chunk_index: 1 first_position: 8 last: true } }")
    with pytest.raises(ProtocolError, match=r"resync.text.first_position: 8"):
        target_event_from_proto(gap, assembler)


def test_unfinished_texts_are_bounded_together() -> None:
    assembler = TextAssembler(3)
    for handle in (1, 2):
        message = target_event(f"resync {{ handle: {handle} text {{ token_ids: 1 }} }}")
        assert target_event_from_proto(message, assembler) is None
    with pytest.raises(ProtocolError, match="exceed 3 tokens"):
        target_event_from_proto(target_event("resync { handle: 3 text { token_ids: [1, 2] } }"), assembler)


def test_a_closed_sequence_forgets_its_chunks() -> None:
    assembler = TextAssembler(100)
    target_event_from_proto(target_event("resync { handle: 1 text { token_ids: 1 } }"), assembler)
    assert target_event_from_proto(target_event("close_sequence { handle: 1 }"), assembler) == link.CloseSequence(
        handle=1
    )
    with pytest.raises(ProtocolError, match="chunk_index"):
        target_event_from_proto(target_event("resync { handle: 1 text { chunk_index: 1 } }"), assembler)


def test_one_bad_event_does_not_spoil_its_message() -> None:
    message = speculation_pb2.LinkRequest(
        header=IDENTITY.header(1),
        events=[
            target_event("ping { nonce: 1 }"),
            target_event("launch { rows { source: 9 } }"),
            target_event("ping { nonce: 2 }"),
        ],
    )
    read = LinkReader(IDENTITY, max_unfinished_tokens=100).target_events(message)
    assert read.events == [link.Ping(nonce=1), link.Ping(nonce=2)]
    assert len(read.problems) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda header: setattr(header, "link_id", 8),
        lambda header: setattr(header, "engine_epoch", 8),
        lambda header: setattr(header, "draft_incarnation", 8),
        lambda header: setattr(header, "protocol_version", 2),
        lambda header: setattr(header, "message_number", 0),
    ],
)
def test_a_message_that_does_not_belong_here_is_dropped(
    change: Callable[[speculation_pb2.LinkHeader], None],
) -> None:
    (message,) = LinkWriter(IDENTITY).responses([link.Pong(nonce=1)])
    change(message.header)
    read = LinkReader(IDENTITY).draft_events(message)
    assert read.events == []
    assert len(read.problems) == 1


def test_a_duplicate_message_is_dropped() -> None:
    (message,) = LinkWriter(IDENTITY).responses([link.Pong(nonce=1)])
    reader = LinkReader(IDENTITY)
    assert reader.draft_events(message).events == [link.Pong(nonce=1)]
    assert reader.draft_events(message).events == []


def test_unknown_capabilities_are_left_out() -> None:
    event = draft_event_from_proto(draft_event("hello_ack { capabilities: [1, 99] }"))
    assert isinstance(event, link.HelloAck)
    assert event.capabilities == frozenset({link.Capability.SEQUENTIAL})


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerationRequest(max_tokens=-1), "max_tokens"),
        (GenerationRequest(n=2**32), "n"),
        (GenerationRequest(seed=-1), "seed"),
        (GenerationRequest(seed=2**64), "seed"),
        (GenerationRequest(priority=2**31), "priority"),
        (GenerationRequest(token_ids=(-1,)), "token_ids"),
        (GenerationRequest(stop_token_ids=(2**32,)), "stop_token_ids"),
        (GenerationRequest(logit_bias=((-5, 1.0),)), "logit_bias"),
        (GenerationRequest(logit_bias=((5, 1.0), (5, 2.0))), "logit_bias"),
        (GenerationRequest(speculation=SpeculationChoice(max_tokens=-1)), "speculation.max_tokens"),
    ],
)
def test_a_client_does_not_send_what_the_contract_cannot_carry(request_: GenerationRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}:"):
        generation_conversion.request_to_proto(request_)


def test_an_unknown_wish_is_refused() -> None:
    spec = generation_pb2.GenerationSpec()
    spec.speculation.MergeFromString(b"\x08\x63")  # preference = 99
    with pytest.raises(InvalidRequest, match=r"^speculation.preference: 99"):
        generation_conversion.request_from_proto(spec)


def test_unset_fields_keep_their_meaning() -> None:
    request = generation_conversion.request_from_proto(generation_pb2.GenerationSpec())
    assert request == GenerationRequest()
    assert request.skip_special_tokens


def test_a_stop_string_that_nobody_asked_for() -> None:
    message = generation_pb2.StreamGenerateResponse(final=generation_pb2.Final(stop_string="x"))
    with pytest.raises(ProtocolError, match=r"^final.stop_string:"):
        generation_conversion.event_from_proto(message, ["y"])
    with pytest.raises(ProtocolError, match=r"^event:"):
        generation_conversion.event_from_proto(generation_pb2.StreamGenerateResponse(), [])

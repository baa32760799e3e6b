"""Every value survives the wire: domain → protobuf → bytes → protobuf → domain."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rpc import strategies

from outrider.core import dispatch, generation, link
from outrider.core.fleet import FleetStatus
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.rpc import dispatch_conversion, generation_conversion
from outrider.rpc.fleet_conversion import fleet_from_proto, fleet_to_proto
from outrider.rpc.link_conversion import LinkIdentity, LinkReader, LinkWriter
from outrider.rpc.link_draft_conversion import MAX_TABLE_ENTRIES
from outrider.rpc.link_target_conversion import hello_from_proto, hello_to_proto
from outrider.rpc.message_groups import MAX_GROUP_BYTES
from outrider.rpc.report_conversion import status_from_proto, status_to_proto
from outrider.rpc.sampling_conversion import sampling_from_proto, sampling_to_proto
from outrider.rpc.token_chunks import MAX_CHUNK_TOKENS
from outrider.v1 import dispatch_pb2, generation_pb2, speculation_pb2

RULE = VerificationRule.COUPLED
IDENTITY = LinkIdentity(link_id=7, engine_epoch=3, draft_incarnation=5)


def through_target_wire(events: list[link.TargetEvent]) -> list[link.TargetEvent]:
    reader = LinkReader(IDENTITY, max_unfinished_tokens=1 << 20)
    received: list[link.TargetEvent] = []
    for message in LinkWriter(IDENTITY).requests(events):
        read = reader.target_events(speculation_pb2.LinkRequest.FromString(message.SerializeToString()))
        assert read.problems == ()
        received.extend(read.events)
    return received


def through_draft_wire(events: list[link.DraftEvent], *, packs_tables: bool = True) -> list[link.DraftEvent]:
    reader = LinkReader(IDENTITY)
    received: list[link.DraftEvent] = []
    for message in LinkWriter(IDENTITY, packs_tables=packs_tables).responses(events):
        read = reader.draft_events(speculation_pb2.LinkResponse.FromString(message.SerializeToString()))
        assert read.problems == ()
        received.extend(read.events)
    return received


@given(st.lists(strategies.target_events, max_size=4))
def test_target_events(events: list[link.TargetEvent]) -> None:
    assert through_target_wire(events) == events


@given(st.lists(strategies.draft_events, max_size=4), st.booleans())
def test_draft_events(events: list[link.DraftEvent], packs_tables: bool) -> None:
    assert through_draft_wire(events, packs_tables=packs_tables) == events


@given(strategies.hellos)
def test_hello(hello: link.Hello) -> None:
    header = LinkIdentity(link_id=hello.link_id, engine_epoch=hello.engine_epoch, draft_incarnation=0).header(1)
    message = speculation_pb2.Hello.FromString(hello_to_proto(hello).SerializeToString())
    assert hello_from_proto(message, header) == hello


@given(strategies.commands)
def test_router_commands(command: dispatch.RouterCommand) -> None:
    data = dispatch_conversion.command_to_proto(command).SerializeToString()
    assert dispatch_conversion.command_from_proto(dispatch_pb2.RouterCommand.FromString(data)) == command


@given(strategies.engine_events)
def test_engine_events(event: dispatch.EngineEvent) -> None:
    data = dispatch_conversion.event_to_proto(event).SerializeToString()
    assert dispatch_conversion.event_from_proto(dispatch_pb2.EngineEvent.FromString(data)) == event


@given(strategies.generation_requests())
def test_generation_requests(request: generation.GenerationRequest) -> None:
    data = generation_conversion.request_to_proto(request).SerializeToString()
    assert generation_conversion.request_from_proto(generation_pb2.GenerationSpec.FromString(data)) == request


@given(strategies.generation_events)
def test_generation_events(event: generation.GenerationEvent) -> None:
    data = generation_conversion.event_to_proto(event).SerializeToString()
    message = generation_pb2.StreamGenerateResponse.FromString(data)
    assert generation_conversion.event_from_proto(message, strategies.STOP_STRINGS) == event


@given(strategies.models)
def test_model_description(model: generation.ModelDescription) -> None:
    data = generation_conversion.model_to_proto(model).SerializeToString()
    message = generation_pb2.GetModelInfoResponse.FromString(data)
    assert generation_conversion.model_from_proto(message) == model


@given(strategies.fleets)
def test_fleet(fleet: FleetStatus) -> None:
    assert fleet_from_proto(fleet_to_proto(fleet)) == fleet


@given(strategies.statuses)
def test_engine_status(status: dispatch.EngineStatus) -> None:
    data = status_to_proto(status).SerializeToString()
    assert status_from_proto(generation_pb2.EngineStatus.FromString(data), "status") == status


@given(strategies.double_samplings)
def test_target_and_draft_get_the_same_numbers(chosen: SamplingParams) -> None:
    """float64 from the client → float32 at the target → the same float32 at the draft."""
    at_target = sampling_from_proto(
        speculation_pb2.DraftSampling.FromString(sampling_to_proto(chosen).SerializeToString())
    )
    at_draft = sampling_from_proto(
        speculation_pb2.DraftSampling.FromString(sampling_to_proto(at_target).SerializeToString())
    )
    assert at_draft == at_target


@settings(max_examples=20)
@given(st.integers(0, 3 * MAX_CHUNK_TOKENS + 1), strategies.samplings)
def test_a_long_text_travels_in_chunks(length: int, sampling: SamplingParams) -> None:
    opening = link.OpenSequence(
        handle=1, token_ids=tuple(range(length)), prompt_len=0, sampling=sampling, noise_key=0, rule=RULE
    )
    messages = list(LinkWriter(IDENTITY).requests([opening]))
    sizes = [
        len(event.open_sequence.text.token_ids) or len(event.resync.text.token_ids)
        for message in messages
        for event in message.events
    ]
    assert max(sizes) <= MAX_CHUNK_TOKENS
    assert sum(sizes) == length
    assert through_target_wire([opening]) == [opening]


def test_more_than_one_message_when_the_events_are_large() -> None:
    events: list[link.TargetEvent] = [
        link.Resync(handle=handle, first_position=0, token_ids=(2**31,) * 100_000) for handle in range(4)
    ]
    messages = list(LinkWriter(IDENTITY).requests(events))
    assert len(messages) > 1
    assert all(message.ByteSize() <= MAX_GROUP_BYTES + 1024 for message in messages)
    assert [message.header.message_number for message in messages] == list(range(1, len(messages) + 1))
    assert through_target_wire(events) == events


@given(strategies.tables())
def test_a_table_is_columns_where_the_target_reads_them_and_entries_elsewhere(table: link.OutcomeTable) -> None:
    (packed,), (plain,) = (list(LinkWriter(IDENTITY, packs_tables=one).responses([table])) for one in (True, False))
    columns, entries = packed.events[0].outcome_table, plain.events[0].outcome_table
    assert len(entries.entries) == len(columns.block_ids) == len(table)
    assert not columns.entries
    assert not entries.block_ids


@settings(max_examples=10)
@given(strategies.tables().filter(len), st.booleans())
def test_a_large_table_without_columns_arrives_in_usable_pieces(table: link.OutcomeTable, last: bool) -> None:
    entries = table.entries() * (MAX_TABLE_ENTRIES + 1)
    large = link.OutcomeTable.of(table.handle, table.base_len, table.parent_block_id, entries, last)
    received = through_draft_wire([large], packs_tables=False)
    pieces = [piece for piece in received if isinstance(piece, link.OutcomeTable)]
    assert len(pieces) >= 2
    assert tuple(entry for piece in pieces for entry in piece.entries()) == entries
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [last]
    assert through_draft_wire([large]) == [large], "as columns it is one"

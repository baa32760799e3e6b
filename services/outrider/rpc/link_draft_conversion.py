"""Events of the draft on a link: to protobuf (draft's side) and back (target's side).

The draft is not trusted: lengths, enum values and probabilities are checked here; ids against the
vocabulary and blocks against the committed text where they are used.
"""

from collections.abc import Callable, Iterable, Mapping

from outrider.core import link
from outrider.core.errors import ProtocolError
from outrider.core.proposal import BlockLaws, Proposal, SparseLaw
from outrider.core.speculation import ProposalSource
from outrider.rpc.enums import CAPABILITIES, LINK_ERROR_CODES, REFUSAL_REASONS, protocol_error
from outrider.v1 import speculation_pb2 as pb

__all__ = ["MAX_TABLE_ENTRIES", "draft_event_from_proto", "draft_event_to_proto"]

MAX_TABLE_ENTRIES = 64
"""Entries of an outcome table per message; a larger table without columns is cut into chunks."""


def draft_event_to_proto(event: link.DraftEvent, *, packs_tables: bool) -> list[pb.DraftEvent]:
    """One event, in order; a large outcome table becomes several. `packs_tables`: its outcomes become columns."""
    if isinstance(event, link.DraftProposal):
        return [pb.DraftEvent(proposal=_proposal_to_proto(event.handle, event.proposal))]
    if isinstance(event, link.OutcomeTable):
        return [_columns_to_proto(event)] if packs_tables else _entries_to_proto(event)
    if isinstance(event, BlockLaws):
        return [pb.DraftEvent(block_laws=_block_laws_to_proto(event))]
    if isinstance(event, link.HelloAck):
        return [pb.DraftEvent(hello_ack=_ack_to_proto(event))]
    if isinstance(event, link.OpenAck):
        return [pb.DraftEvent(open_ack=pb.OpenAck(handle=event.handle, have_len=event.have_len))]
    if isinstance(event, link.OpenNack):
        reason = REFUSAL_REASONS.to_proto(event.reason)
        return [pb.DraftEvent(open_nack=pb.OpenNack(handle=event.handle, reason=reason, detail=event.detail))]
    if isinstance(event, link.NeedResync):
        return [pb.DraftEvent(need_resync=pb.NeedResync(handle=event.handle, have_len=event.have_len))]
    if isinstance(event, link.Evicted):
        evicted = pb.Evicted(handle=event.handle, reason=REFUSAL_REASONS.to_proto(event.reason))
        return [pb.DraftEvent(evicted=evicted)]
    return [_replica_event_to_proto(event)]


def draft_event_from_proto(message: pb.DraftEvent) -> link.DraftEvent:
    """Convert back. Raises `ProtocolError` naming the field when the event is malformed.

    Each chunk of an outcome table becomes a table of its own: its entries can be used at once, and
    a missing chunk would only cost hits.
    """
    kind = message.WhichOneof("event")
    if kind is None:
        raise protocol_error("event", "is not set")
    return _READERS[kind](message)


def _replica_event_to_proto(
    event: link.DraftStats | link.Busy | link.Drain | link.LinkError | link.Pong,
) -> pb.DraftEvent:
    if isinstance(event, link.DraftStats):
        stats = pb.DraftStats(
            open_sequences=event.open_sequences,
            kv_usage=event.kv_usage,
            step_ms=event.step_ms,
            queued_rows=event.queued_rows,
            drift_total=event.drift_total,
        )
        return pb.DraftEvent(stats=stats)
    if isinstance(event, link.Busy):
        return pb.DraftEvent(busy=pb.Busy(retry_after_ms=round(event.retry_after_s * 1e3)))
    if isinstance(event, link.Drain):
        return pb.DraftEvent(drain=pb.Drain(reason=event.reason))
    if isinstance(event, link.LinkError):
        error = pb.LinkError(code=LINK_ERROR_CODES.to_proto(event.code), message=event.message)
        return pb.DraftEvent(error=error)
    return pb.DraftEvent(pong=pb.Pong(nonce=event.nonce))


def _ack_to_proto(ack: link.HelloAck) -> pb.HelloAck:
    return pb.HelloAck(
        incarnation=ack.incarnation,
        draft_model=ack.draft_model,
        vocab_size=ack.vocab_size,
        tokenizer_fingerprint=ack.tokenizer_fingerprint,
        max_model_len=ack.max_model_len,
        kv_capacity_tokens=ack.kv_capacity_tokens,
        step_ms=ack.step_ms,
        capabilities=sorted(CAPABILITIES.to_proto(one) for one in ack.capabilities),
    )


def _ack_from_proto(message: pb.HelloAck) -> link.HelloAck:
    return link.HelloAck(
        incarnation=message.incarnation,
        draft_model=message.draft_model,
        vocab_size=message.vocab_size,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        max_model_len=message.max_model_len,
        kv_capacity_tokens=message.kv_capacity_tokens,
        step_ms=message.step_ms,
        capabilities=CAPABILITIES.known(message.capabilities),
    )


def _proposal_to_proto(handle: int, proposal: Proposal) -> pb.DraftProposal:
    return pb.DraftProposal(
        handle=handle,
        base_len=proposal.base_len,
        block_id=proposal.block_id,
        token_ids=proposal.token_ids,
        laws=_laws_to_proto(proposal.laws),
    )


def _proposal_from_proto(message: pb.DraftProposal, field: str) -> Proposal:
    if message.laws and len(message.laws) != len(message.token_ids):
        raise protocol_error(f"{field}.laws", f"{len(message.laws)} laws for {len(message.token_ids)} tokens")
    if message.block_id == 0:
        raise protocol_error(f"{field}.block_id", "0 is not a block")
    return Proposal(
        base_len=message.base_len,
        block_id=message.block_id,
        token_ids=tuple(message.token_ids),
        source=ProposalSource.DRAFT,
        laws=tuple(_law_from_proto(law, f"{field}.laws") for law in message.laws),
    )


def _block_laws_to_proto(event: BlockLaws) -> pb.BlockLaws:
    return pb.BlockLaws(
        handle=event.handle, base_len=event.base_len, block_id=event.block_id, laws=_laws_to_proto(event.laws)
    )


def _block_laws(message: pb.BlockLaws) -> BlockLaws:
    if message.block_id == 0:
        raise protocol_error("block_laws.block_id", "0 is not a block")
    return BlockLaws(
        handle=message.handle,
        base_len=message.base_len,
        block_id=message.block_id,
        laws=tuple(_law_from_proto(law, "block_laws.laws") for law in message.laws),
    )


def _laws_to_proto(laws: Iterable[SparseLaw]) -> list[pb.SparseLaw]:
    return [pb.SparseLaw(token_ids=law.token_ids, probs=law.probs) for law in laws]


def _law_from_proto(message: pb.SparseLaw, field: str) -> SparseLaw:
    if len(message.token_ids) != len(message.probs):
        raise protocol_error(field, f"{len(message.token_ids)} ids and {len(message.probs)} probabilities")
    if not all(0.0 <= prob <= 1.0 for prob in message.probs):  # false for NaN too
        raise protocol_error(f"{field}.probs", "a probability is outside [0, 1]")
    return SparseLaw(token_ids=tuple(message.token_ids), probs=tuple(message.probs))


def _columns_to_proto(table: link.OutcomeTable) -> pb.DraftEvent:
    event = pb.DraftEvent()
    columns = event.outcome_table  # filled in place: a message that is put into another is copied
    columns.handle = table.handle
    columns.base_len = table.base_len
    columns.parent_block_id = table.parent_block_id
    columns.last = table.last
    columns.num_accepted.extend(table.num_accepted)
    columns.next_token_ids.extend(table.next_token_ids)
    columns.block_ids.extend(table.block_ids)
    columns.block_lens.extend(table.block_lens)
    columns.token_ids.extend(table.token_ids)
    columns.laws.extend(_laws_to_proto(table.laws))
    columns.SetInParent()  # where all of it is zero or empty, too
    return event


def _entries_to_proto(table: link.OutcomeTable) -> list[pb.DraftEvent]:
    entries = [
        pb.OutcomeEntry(
            num_accepted=entry.num_accepted,
            next_token_id=entry.next_token_id,
            proposal=_proposal_to_proto(table.handle, entry.proposal),
        )
        for entry in table.entries()
    ]
    starts = range(0, max(len(entries), 1), MAX_TABLE_ENTRIES)
    return [
        pb.DraftEvent(
            outcome_table=pb.OutcomeTable(
                handle=table.handle,
                base_len=table.base_len,
                parent_block_id=table.parent_block_id,
                chunk_index=index,
                last=table.last and index == len(starts) - 1,
                entries=entries[start : start + MAX_TABLE_ENTRIES],
            )
        )
        for index, start in enumerate(starts)
    ]


def _table_from_proto(message: pb.OutcomeTable) -> link.OutcomeTable:
    """Either form. Looks at lengths and block ids alone: of all the outcomes at most one will be looked at."""
    if message.entries:
        return _table_from_entries(message)
    num_outcomes, num_tokens = len(message.block_ids), len(message.token_ids)
    lengths = {
        "num_accepted": len(message.num_accepted),
        "next_token_ids": len(message.next_token_ids),
        "block_lens": len(message.block_lens),
    }
    for field, length in lengths.items():
        if length != num_outcomes:
            raise protocol_error(f"outcome_table.{field}", f"{length} for {num_outcomes} blocks")
    # Slices first: they copy a column in one go.
    block_ids, block_lens = tuple(message.block_ids[:]), tuple(message.block_lens[:])
    if 0 in block_ids:
        raise protocol_error("outcome_table.block_ids", "0 is not a block")
    if sum(block_lens) != num_tokens:
        raise protocol_error("outcome_table.token_ids", f"{num_tokens} in blocks of {sum(block_lens)}")
    if message.laws and len(message.laws) != num_tokens:
        raise protocol_error("outcome_table.laws", f"{len(message.laws)} laws for {num_tokens} tokens")
    return link.OutcomeTable(
        handle=message.handle,
        base_len=message.base_len,
        parent_block_id=message.parent_block_id,
        num_accepted=tuple(message.num_accepted[:]),
        next_token_ids=tuple(message.next_token_ids[:]),
        block_ids=block_ids,
        block_lens=block_lens,
        token_ids=tuple(message.token_ids[:]),
        laws=tuple(_law_from_proto(law, "outcome_table.laws") for law in message.laws),
        last=message.last,
    )


def _table_from_entries(message: pb.OutcomeTable) -> link.OutcomeTable:
    if message.block_ids:
        raise protocol_error("outcome_table.entries", "beside columns")
    entries = [_entry_from_proto(entry, message.handle) for entry in message.entries]
    try:
        return link.OutcomeTable.of(message.handle, message.base_len, message.parent_block_id, entries, message.last)
    except ValueError as error:
        raise ProtocolError(f"outcome_table.entries.proposal.{error}") from error


def _entry_from_proto(entry: pb.OutcomeEntry, handle: int) -> link.OutcomeEntry:
    if entry.proposal.handle != handle:
        raise protocol_error("outcome_table.entries.proposal.handle", f"{entry.proposal.handle} is not {handle}")
    return link.OutcomeEntry(
        num_accepted=entry.num_accepted,
        next_token_id=entry.next_token_id,
        proposal=_proposal_from_proto(entry.proposal, "outcome_table.entries.proposal"),
    )


def _draft_proposal(message: pb.DraftProposal) -> link.DraftProposal:
    return link.DraftProposal(handle=message.handle, proposal=_proposal_from_proto(message, "proposal"))


def _open_nack(message: pb.OpenNack) -> link.OpenNack:
    reason = REFUSAL_REASONS.from_proto(message.reason, "open_nack.reason")
    return link.OpenNack(handle=message.handle, reason=reason, detail=message.detail)


def _evicted(message: pb.Evicted) -> link.Evicted:
    return link.Evicted(handle=message.handle, reason=REFUSAL_REASONS.from_proto(message.reason, "evicted.reason"))


def _stats(message: pb.DraftStats) -> link.DraftStats:
    return link.DraftStats(
        open_sequences=message.open_sequences,
        kv_usage=message.kv_usage,
        step_ms=message.step_ms,
        queued_rows=message.queued_rows,
        drift_total=message.drift_total,
    )


def _error(message: pb.LinkError) -> link.LinkError:
    return link.LinkError(code=LINK_ERROR_CODES.from_proto(message.code, "error.code"), message=message.message)


_READERS: Mapping[str, Callable[[pb.DraftEvent], link.DraftEvent]] = {
    "hello_ack": lambda message: _ack_from_proto(message.hello_ack),
    "open_ack": lambda message: link.OpenAck(handle=message.open_ack.handle, have_len=message.open_ack.have_len),
    "open_nack": lambda message: _open_nack(message.open_nack),
    "need_resync": lambda message: link.NeedResync(
        handle=message.need_resync.handle, have_len=message.need_resync.have_len
    ),
    "evicted": lambda message: _evicted(message.evicted),
    "proposal": lambda message: _draft_proposal(message.proposal),
    "outcome_table": lambda message: _table_from_proto(message.outcome_table),
    "block_laws": lambda message: _block_laws(message.block_laws),
    "stats": lambda message: _stats(message.stats),
    "busy": lambda message: link.Busy(retry_after_s=message.busy.retry_after_ms / 1e3),
    "drain": lambda message: link.Drain(reason=message.drain.reason),
    "error": lambda message: _error(message.error),
    "pong": lambda message: link.Pong(nonce=message.pong.nonce),
}

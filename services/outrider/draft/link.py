"""One target's link: what was agreed, its sequences, and the events that wait to be sent."""

from outrider.core.link import DraftEvent, Hello
from outrider.draft.margin import TableMargin
from outrider.draft.sequence import DraftSequence

__all__ = ["Link"]


class Link:
    """State of one link. Two links share nothing but the engine and its KV."""

    def __init__(
        self, link_id: int, hello: Hello, *, vocab_size: int, max_num_draft_tokens: int, table_margin_s: float
    ) -> None:
        self.link_id = link_id
        self.hello = hello
        self.vocab_size = vocab_size
        """Ids below this are valid on both sides."""
        self.max_num_draft_tokens = max_num_draft_tokens
        self.margin = TableMargin(table_margin_s)
        """Of this target's tables: it depends on the way to it, and on how steady its steps are."""
        self.num_ranked = 0
        """Likely tokens to keep per position; 0 unless the target can use outcome tables."""
        self.late_laws = False
        """Tables go without laws; those of a block follow when it is launched."""
        self.sequences: dict[int, DraftSequence] = {}
        """By the target's handle, oldest first."""
        self.drift_total = 0
        """Prefix hashes that did not match."""
        self.busy_until = 0.0
        """Until then the target knows that the draft is busy."""
        self.last_round = 0
        self.last_prefill = 0
        """Numbers of the last steps that served this link; the longest waiting comes first."""
        self._outbox: list[DraftEvent] = []
        self._num_blocks = 0

    def next_block_id(self) -> int:
        """A block id that this link has not seen: 1, 2, …"""
        self._num_blocks += 1
        return self._num_blocks

    def send(self, event: DraftEvent) -> None:
        """Queue an event; all that are queued travel in one message."""
        self._outbox.append(event)

    @property
    def has_outbound(self) -> bool:
        """True when events wait."""
        return bool(self._outbox)

    def take_outbound(self) -> tuple[DraftEvent, ...]:
        """Remove and return the waiting events, in order."""
        events = tuple(self._outbox)
        self._outbox.clear()
        return events

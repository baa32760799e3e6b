"""Which draft a target takes: the one with the fewest links, and no other until that pays.

Every target decides for itself, from what all drafts have said at one look:

- Without a link it takes the least loaded draft. Equal ones are ordered by rendezvous hashing, so that targets
  which start together spread.
- With a link it stays until the draft goes, or has at least two links more than another one. One link more is no
  reason: moving would only swap the two.
- It then moves with chance (La - Lb) / 2La per look, for La links here and Lb there. All La targets see the same
  figures, and so half the difference moves and not everybody.

A move is a new link to another draft: rounds until it is up go without that draft's blocks.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["DraftAssignment", "DraftOffer", "by_load", "moves"]

_HOLD_OFF_LOOKS = 60
"""How long nobody is moved to a draft that could not be linked; a restarted one has another address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOffer:
    """A draft that serves, and its load."""

    replica_id: str
    address: str
    """host:port."""
    links: int = 0
    """Targets linked to it, the asking one included."""
    sequences: int = 0
    """Sequences open on it, over all links."""
    fresh: bool = True
    """Whether it answered at this look; otherwise the figures are old and it may be gone."""


def by_load(offers: Sequence[DraftOffer], engine_id: str) -> list[DraftOffer]:
    """The least loaded first: links, then sequences, then by rendezvous hashing; those without an answer last."""

    def weight(offer: DraftOffer) -> tuple[bool, int, int, int, str]:
        preference = zlib.crc32(f"{engine_id} {offer.replica_id}".encode())
        return not offer.fresh, offer.links, offer.sequences, -preference, offer.replica_id

    return sorted(offers, key=weight)


def moves(here: DraftOffer, there: DraftOffer, random: Random) -> bool:
    """Whether a target linked to `here` moves to `there` now; draws from `random` only where it may."""
    gap = here.links - there.links
    return here.fresh and there.fresh and gap >= 2 and random.random() * 2 * here.links < gap


class DraftAssignment:
    """One target's choice over time."""

    def __init__(self, engine_id: str, random: Random) -> None:
        self._engine_id = engine_id
        self._random = random
        self._wanted = ""
        self._held_off: dict[str, int] = {}

    def look(self, offers: Sequence[DraftOffer], linked: str) -> list[str]:
        """Addresses in order of preference, for the drafts there are now.

        `linked`: address of the present link; empty: there is none. A link to an address that is not in the
        answer is to be given up: on a move, the present draft is left out once.
        """
        self._note_outcome(linked)
        ordered = by_load(offers, self._engine_id)
        here = next((one for one in ordered if one.address == linked), None)
        first = self._first(ordered, here)
        addresses = [one.address for one in ordered if one not in (here, first)]
        if first is not None:
            addresses.insert(0, first.address)
        self._wanted = addresses[0] if addresses else ""
        return addresses

    def _first(self, ordered: Sequence[DraftOffer], here: DraftOffer | None) -> DraftOffer | None:
        """The draft to have a link to; None without drafts."""
        if here is None:
            # The one chosen at an earlier look, whose link may be coming up, before the least loaded.
            pending = (one for one in ordered if one.fresh and one.address == self._wanted)
            return next(pending, ordered[0] if ordered else None)
        goal = next((one for one in ordered if one.address not in self._held_off), here)
        return goal if moves(here, goal, self._random) else here

    def _note_outcome(self, linked: str) -> None:
        """A link to another draft than the wanted one means that the wanted one could not be linked."""
        self._held_off = {address: looks - 1 for address, looks in self._held_off.items() if looks > 1}
        if linked and self._wanted and linked != self._wanted:
            self._held_off[self._wanted] = _HOLD_OFF_LOOKS

"""Which draft a target takes: spread, stickiness, and a fleet that comes to rest."""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.target.draft_assignment import DraftAssignment, DraftOffer, by_load, moves


def offer(name: str, links: int = 0, sequences: int = 0, *, fresh: bool = True) -> DraftOffer:
    return DraftOffer(replica_id=name, address=f"{name}:1", links=links, sequences=sequences, fresh=fresh)


DRAFTS = [offer(f"d{index}") for index in range(4)]


class Always(Random):
    """Every chance comes true."""

    def random(self) -> float:
        return 0.0


class Never(Random):
    """No draw is allowed."""

    def random(self) -> float:
        raise AssertionError("drew without need")


class Targets:
    """Targets that look at the same figures at the same time, and whose links come up at once."""

    def __init__(self, count: int, drafts: Sequence[str], seed: int) -> None:
        self.drafts = list(drafts)
        self.linked = {f"t{index}": "" for index in range(count)}
        self._choices = {name: DraftAssignment(name, Random(f"{seed} {name}")) for name in self.linked}

    @property
    def links(self) -> Mapping[str, int]:
        counted = Counter(self.linked.values())
        return {name: counted[f"{name}:1"] for name in self.drafts}

    @property
    def gap(self) -> int:
        return max(self.links.values()) - min(self.links.values())

    def look(self) -> int:
        """Everybody looks once; returns how many changed their draft."""
        offers = [offer(name, links) for name, links in self.links.items()]
        before = dict(self.linked)
        for name, choice in self._choices.items():
            addresses = choice.look(offers, self.linked[name])
            if self.linked[name] not in addresses:
                self.linked[name] = addresses[0]
        return sum(self.linked[name] != before[name] for name in before)

    def settle(self) -> None:
        for _ in range(400):
            if self.gap <= 1:
                return
            self.look()
        raise AssertionError(f"not balanced after 400 looks: {self.links}")


def test_targets_that_start_together_spread() -> None:
    favourites = Counter(by_load(DRAFTS, f"engine-{index}")[0].replica_id for index in range(400))
    assert len(favourites) == 4
    assert min(favourites.values()) > 50


def test_the_order_depends_on_the_drafts_and_not_on_their_order() -> None:
    order = by_load(DRAFTS, "e1")
    assert by_load(DRAFTS[::-1], "e1") == order
    assert by_load(DRAFTS[1:], "e1") == [one for one in order if one is not DRAFTS[0]]


def test_fewest_links_first_then_sequences_and_old_figures_last() -> None:
    offers = [offer("old", 0, fresh=False), offer("b", 1, 9), offer("a", 1, 2), offer("c", 0, 50)]
    assert [one.replica_id for one in by_load(offers, "e")] == ["c", "a", "b", "old"]


def test_a_linked_target_stays_over_a_difference_of_one() -> None:
    choice = DraftAssignment("e", Never())
    assert choice.look([offer("a", 3), offer("b", 2)], "a:1") == ["a:1", "b:1"]


def test_a_move_leaves_the_present_draft_out_once() -> None:
    choice = DraftAssignment("e", Always())
    offers = [offer("a", 4), offer("b", 1), offer("c", 3)]
    assert choice.look(offers, "a:1") == ["b:1", "c:1"]
    assert choice.look([offer("a", 3), offer("b", 2), offer("c", 3)], "b:1")[0] == "b:1"


def test_the_chance_halves_the_difference() -> None:
    random = Random(7)
    moved = sum(moves(offer("a", 10), offer("b", 4), random) for _ in range(10_000))
    assert abs(moved / 10_000 - 0.3) < 0.02


def test_nobody_moves_on_old_figures() -> None:
    assert not moves(offer("a", 9), offer("b", 0, fresh=False), Never())
    assert not moves(offer("a", 9, fresh=False), offer("b", 0), Never())


def test_a_draft_that_cannot_be_linked_draws_nobody_again_for_a_while() -> None:
    choice = DraftAssignment("e", Always())
    offers = [offer("a", 4), offer("b", 0)]
    assert choice.look(offers, "a:1") == ["b:1"]
    assert choice.look([offer("a", 3), offer("b", 0)], "") == ["b:1", "a:1"]
    held = [choice.look(offers, "a:1")[0] for _ in range(100)]
    assert held[0] == "a:1"
    assert 1 < held.index("b:1") < 100


def test_the_loss_of_a_draft_leads_to_the_least_loaded() -> None:
    choice = DraftAssignment("e", Never())
    assert choice.look([offer("a", 3), offer("b", 2), offer("c", 1)], "gone:1")[0] == "c:1"


def test_a_choice_whose_link_is_coming_up_stays() -> None:
    choice = DraftAssignment("e", Never())
    assert choice.look([offer("a", 0), offer("b", 1)], "") == ["a:1", "b:1"]
    assert choice.look([offer("a", 2), offer("b", 1)], "") == ["a:1", "b:1"]
    assert choice.look([offer("a", 2, fresh=False), offer("b", 1)], "") == ["b:1", "a:1"]


def test_without_drafts_there_is_nothing_to_choose() -> None:
    assert DraftAssignment("e", Never()).look([], "") == []


def test_the_same_draws_make_the_same_moves() -> None:
    runs = []
    for _ in range(2):
        fleet = Targets(9, ["a"], seed=3)
        fleet.look()
        fleet.drafts += ["b", "c"]
        fleet.settle()
        runs.append(fleet.linked)
    assert runs[0] == runs[1]


@settings(max_examples=60, deadline=None)
@given(targets=st.integers(1, 24), drafts=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_a_fleet_comes_to_rest_within_one_link_and_stays(targets: int, drafts: int, seed: int) -> None:
    fleet = Targets(targets, ["d0"], seed)
    fleet.look()
    fleet.drafts = [f"d{index}" for index in range(drafts)]
    fleet.settle()
    assert [fleet.look() for _ in range(20)] == [0] * 20
    if drafts > 1:
        fleet.drafts.pop()
        fleet.look()
        fleet.settle()
        assert sum(fleet.links.values()) == targets

"""A draft that reads features gets those of every committed row, and nothing goes wrong without them."""

from pathlib import Path

import pytest
from tests.support.feature_engines import FeatureDraft, FeatureTarget
from tests.support.local_engine import LocalEngine, request
from tests.unit.engine.tiny_heads import save_random_head
from tests.unit.engine.tiny_models import CONFIGS, random_tokens, save_random_model

from outrider.core.errors import CompatibilityError
from outrider.core.link import Features, OpenSequence
from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice, SpeculationMode, SpeculationPreference, VerificationRule
from outrider.draft.config import DraftConfig
from outrider.engine.base import ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig

TARGET = ScriptedConfig(vocab_size=32, slope=0.7)
DRAFT = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.7)
K = 4
GATE = GateSettings(preference=SpeculationPreference.ON, mode=None, max_num_draft_tokens=K, batch_size_threshold=None)
GREEDY = SamplingParams(temperature=0.0)


def feature_engine(**changes: object) -> LocalEngine:
    fields: dict[str, object] = {
        "target": FeatureTarget(TARGET),
        "draft": lambda: FeatureDraft(DRAFT),
        "gate": GATE,
    }
    return LocalEngine(**(fields | changes))  # type: ignore[arg-type]


def requests(sampling: SamplingParams, rule: VerificationRule = VerificationRule.COUPLED) -> list[SequenceRequest]:
    return [
        request(
            range(1, 4 + 7 * n),
            max_tokens=40 + n,
            noise_key=50 + n,
            sampling=sampling,
            speculation=SpeculationChoice(rule=rule),
        )
        for n in range(4)
    ]


def texts(engine: LocalEngine, ones: list[SequenceRequest]) -> list[list[int]]:
    return [one.token_ids for one in engine.run(*ones)]


def drafts(engine: LocalEngine) -> FeatureDraft:
    assert engine.transport is not None
    assert engine.transport.drafter is not None
    inner = engine.transport.drafter._engine
    assert isinstance(inner, FeatureDraft)
    return inner


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()])
def test_every_committed_row_is_run_over_its_feature(sampling: SamplingParams) -> None:
    plain = texts(LocalEngine(target=TARGET), requests(sampling))
    engine = feature_engine()
    assert texts(engine, requests(sampling)) == plain
    counters = engine.loop.counters
    assert 0.3 < counters.accepted / counters.verified < 1
    assert counters.proposers.invalid == counters.proposers.late == 0
    assert engine.transport is not None
    drafter = engine.transport.drafter
    assert drafter is not None
    assert drafter.counters.dropped_events == drafter.counters.resyncs == 0
    # Only what is drafted behind the first token of a block has no feature to read.
    assert drafts(engine).self_fed_rows == drafter.counters.drafted_tokens - drafter.counters.blocks


def test_it_drafts_on_request_even_where_ahead_would_be_allowed() -> None:
    engine = feature_engine()
    texts(engine, requests(GREEDY))
    assert not engine.loop.proposers.drafts_ahead
    assert engine.loop.counters.proposers.lookups == 0
    assert all(one.end is not None for one in engine.results.values())
    modes = {one.end.speculation.mode for one in engine.results.values() if one.end}
    assert SpeculationMode.CACHED not in modes


def test_rejection_rule_over_features() -> None:
    engine = feature_engine()
    ones = texts(engine, requests(SamplingParams(), VerificationRule.REJECTION))
    assert [len(one) for one in ones] == [40, 41, 42, 43]
    assert engine.loop.counters.accepted > 0
    assert engine.loop.counters.proposers.invalid == 0


def test_long_prompts_are_fed_in_steps_and_found_again_in_the_prefix_cache() -> None:
    prompt = [1 + (i * i) % 29 for i in range(300)]
    config = TargetConfig(prefill_chunk_tokens=64)
    one = request(prompt, max_tokens=30, sampling=GREEDY)
    plain = texts(LocalEngine(target=TARGET, config=config), [one])
    engine = feature_engine(config=config, draft_config=DraftConfig(prefill_chunk_tokens=48))
    assert texts(engine, [one]) == plain
    first = engine.loop.counters.accepted
    assert first > 0
    # Again: the target computes next to nothing of the prompt, and its features are there nevertheless.
    assert texts(engine, [one]) == plain
    assert engine.loop.scheduler.prefix_cache.hit_tokens > 250
    assert engine.loop.counters.accepted == 2 * first


def test_a_restarted_draft_gets_everything_anew() -> None:
    engine = feature_engine()
    ones = requests(GREEDY)
    plain = texts(LocalEngine(target=TARGET), ones)
    keys = [engine.submit(one) for one in ones]
    engine.step(6)
    assert engine.transport is not None
    before = engine.loop.counters.accepted
    assert before > 0
    engine.transport.kill_draft()
    engine.step(4)
    engine.transport.start_draft()
    engine.step(200)
    assert [engine.results[key].token_ids for key in keys] == plain
    assert engine.loop.counters.accepted > before
    opened = [one for one in engine.transport.sent if isinstance(one, OpenSequence)]
    starts = [one for one in engine.transport.sent if isinstance(one, Features) and one.first_position == 0]
    assert len(opened) == len(starts) == 2 * len(ones)


@pytest.mark.parametrize("fault", ["drop", "garbage", "shift"])
def test_spoilt_features_cost_blocks_and_never_text(fault: str) -> None:
    engine = feature_engine()
    ones = requests(GREEDY)
    plain = texts(LocalEngine(target=TARGET), ones)
    assert engine.transport is not None
    send = engine.transport.send

    def spoil(events: list[object]) -> bool:
        kept: list[object] = []
        for event in events:
            if not isinstance(event, Features):
                kept.append(event)
            elif fault == "garbage":
                kept.append(Features(handle=event.handle, first_position=0, num_rows=1, payload=b"x"))
            elif fault == "shift":
                kept.append(Features(handle=event.handle, first_position=7, num_rows=1, payload=bytes(8)))
        return send(kept)  # type: ignore[arg-type]

    engine.transport.send = spoil  # type: ignore[method-assign, assignment]
    assert texts(engine, ones) == plain
    assert engine.loop.counters.verified == 0


def test_a_preempted_sequence_is_fed_again_when_it_is_back() -> None:
    target = ScriptedConfig(vocab_size=32, slope=0.7, num_blocks=36)
    ones = requests(GREEDY)
    plain = texts(LocalEngine(target=TARGET), ones)
    engine = feature_engine(target=FeatureTarget(target))
    assert texts(engine, ones) == plain
    assert engine.loop.scheduler.num_preemptions > 0
    assert engine.loop.counters.accepted > 0


def test_drift_is_repaired_with_text_and_features_from_the_start() -> None:
    engine = feature_engine()
    ones = requests(GREEDY)[:1]
    plain = texts(LocalEngine(target=TARGET), ones)
    (key,) = [engine.submit(one) for one in ones]
    engine.step(5)
    assert engine.transport is not None
    drafter = engine.transport.drafter
    assert drafter is not None
    (link,) = drafter._residents.links.values()
    (held,) = link.sequences.values()
    held.text[2] ^= 1
    held._hash.truncate(0)
    held._hash.extend(held.text)
    before = engine.loop.counters.accepted
    engine.step(200)
    assert engine.results[key].token_ids == plain[0]
    assert drafter.counters.drift == 1
    assert engine.loop.counters.accepted > before


def test_a_target_without_features_is_refused_by_name() -> None:
    with pytest.raises(CompatibilityError, match="features"):
        LocalEngine(target=TARGET, draft=lambda: FeatureDraft(DRAFT))


def test_features_for_a_draft_that_reads_text_alone_do_no_harm() -> None:
    engine = feature_engine(draft=DRAFT)
    plain = texts(LocalEngine(target=TARGET), requests(GREEDY))
    assert texts(engine, requests(GREEDY)) == plain
    assert engine.transport is not None
    assert not any(isinstance(one, Features) for one in engine.transport.sent)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    save_random_model(folder / "target", CONFIGS["llama"])
    save_random_head(folder / "head")
    return folder / "target", folder / "head"


def tiny_target(tiny: tuple[Path, Path]) -> ModelEngine:
    config = EngineConfig(model=str(tiny[0]), feature_head=str(tiny[1]), block_size=4, num_blocks=128)
    return build_engine(config, lambda text: None)


def tiny_head(tiny: tuple[Path, Path]) -> ModelEngine:
    config = EngineConfig(model=str(tiny[1]), kind="eagle3", head_of=str(tiny[0]), block_size=4, num_blocks=128)
    return build_engine(config, lambda text: None)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=2.0)])
@pytest.mark.parametrize("k", [1, 5])
def test_a_random_head_changes_no_token(tiny: tuple[Path, Path], sampling: SamplingParams, k: int) -> None:
    ones = [request(random_tokens(5 + 9 * n, seed=n), max_tokens=40, noise_key=n, sampling=sampling) for n in range(3)]
    plain = texts(LocalEngine(target=tiny_target(tiny)), ones)
    gate = GateSettings(
        preference=SpeculationPreference.ON, max_num_draft_tokens=k, batch_size_threshold=None, min_acceptance_rate=0.0
    )
    engine = LocalEngine(target=tiny_target(tiny), draft=lambda: tiny_head(tiny), gate=gate)
    keys = [engine.submit(one) for one in ones]
    assert engine.transport is not None
    engine.step(8)
    engine.transport.kill_draft()
    engine.step(2)
    engine.transport.start_draft()
    engine.step(200)
    assert [engine.results[key].token_ids for key in keys] == plain
    assert engine.loop.counters.verified > 50
    assert engine.loop.counters.proposers.invalid == 0

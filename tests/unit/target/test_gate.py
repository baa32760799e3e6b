"""The gate: off within a step, back on, and always a reason. Counted, not assumed."""

from dataclasses import replace

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.errors import ConfigError
from outrider.core.policy import ClassPolicy, GateSettings
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice, SpeculationPreference, SpeculationReason
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig

AUTO, ON, OFF = SpeculationPreference.AUTO, SpeculationPreference.ON, SpeculationPreference.OFF
TARGET = ScriptedConfig(vocab_size=32, slope=0.7, num_blocks=1024, max_model_len=2048)
DRAFT = replace(TARGET, agreement=0.9)
BAD_DRAFT = replace(TARGET, agreement=0.0, slope=5.0)


def make(gate: GateSettings, draft: ScriptedConfig | None = DRAFT, config: TargetConfig | None = None) -> LocalEngine:
    return LocalEngine(target=TARGET, draft=draft, gate=gate, config=config)


def test_batch_threshold_with_hysteresis() -> None:
    """Threshold 4, hysteresis 1: six streams switch it off within one step, two bring it back."""
    engine = make(GateSettings(batch_size_threshold=4, batch_size_hysteresis=1))
    assert engine.transport is not None
    counters = engine.loop.counters
    lengths = [400, 400, 60, 60, 60, 60]
    keys = [engine.submit(request(max_tokens=lengths[index], noise_key=index)) for index in range(3)]
    engine.step(6)
    assert counters.verified > 0
    keys += [engine.submit(request(max_tokens=lengths[index], noise_key=index)) for index in range(3, 6)]
    verified, rows, sent = counters.verified, counters.forward_rows, counters.proposers.messages_sent
    engine.step(1)
    assert counters.verified == verified, "the step that admits the fifth stream is already plain"
    engine.step(10)
    assert counters.verified == verified
    assert counters.proposers.messages_sent == sent, "no draft message while off"
    assert counters.forward_rows - rows == 10 * 6 + 3 + 3 * 3, "no extra row: one each, and three prompts of three"
    assert engine.running(keys[0]).last_reason is SpeculationReason.BATCH_TOO_LARGE
    assert engine.loop.status("e").reason is SpeculationReason.BATCH_TOO_LARGE
    while len(engine.loop.scheduler.running) > 4:
        engine.step()
    while len(engine.loop.scheduler.running) == 4:
        assert counters.verified == verified, "four streams are still too many to open again"
        engine.step()
    while len(engine.loop.scheduler.running) > 2:
        engine.step()
    engine.step(4)
    assert counters.verified > verified
    assert engine.loop.status("e").reason is SpeculationReason.ON


def test_off_costs_nothing_over_not_configured() -> None:
    off = make(GateSettings(preference=SpeculationPreference.OFF))
    none = make(GateSettings(), draft=None)
    requests = [request(max_tokens=40, noise_key=key) for key in range(3)]
    assert [one.token_ids for one in off.run(*requests)] == [one.token_ids for one in none.run(*requests)]
    assert off.transport is not None
    assert off.loop.counters.proposers.messages_sent == 0
    assert off.transport.sent == []
    assert off.loop.counters.forward_rows == none.loop.counters.forward_rows
    assert off.loop.counters.steps == none.loop.counters.steps


def test_operator_switches_it_off_and_on_live() -> None:
    engine = make(GateSettings())
    key = engine.submit(request(max_tokens=300))
    engine.step(6)
    engine.loop.gate.update(GateSettings(preference=SpeculationPreference.OFF))
    verified = engine.loop.counters.verified
    engine.step(5)
    assert engine.loop.counters.verified == verified
    assert engine.running(key).last_reason is SpeculationReason.OPERATOR_OFF
    engine.loop.gate.update(GateSettings(max_num_draft_tokens=2))
    engine.step(5)
    assert engine.loop.counters.verified > verified
    assert engine.loop.counters.mean_num_draft_tokens <= 2


@pytest.mark.parametrize(
    ("choice", "sampling", "reason"),
    [
        (SpeculationChoice(preference=SpeculationPreference.OFF), SamplingParams(), SpeculationReason.CLIENT_OFF),
        (SpeculationChoice(max_tokens=0), SamplingParams(), SpeculationReason.CLIENT_OFF),
        (SpeculationChoice(), SamplingParams(temperature=1.5), SpeculationReason.TEMPERATURE),
        (
            SpeculationChoice(preference=SpeculationPreference.ON),
            SamplingParams(temperature=1.5),
            SpeculationReason.ON,
        ),
        (SpeculationChoice(), SamplingParams(temperature=0.9), SpeculationReason.ON),
    ],
)
def test_reason_per_request(choice: SpeculationChoice, sampling: SamplingParams, reason: SpeculationReason) -> None:
    engine = make(GateSettings(max_temperature=1.0))
    (result,) = engine.run(request(max_tokens=40, speculation=choice, sampling=sampling))
    assert result.end is not None
    assert result.end.speculation.reason is reason
    assert (result.end.speculation.stats.verified > 0) == (reason is SpeculationReason.ON)


def test_without_a_draft_the_reason_is_not_configured() -> None:
    (result,) = make(GateSettings(), draft=None).run(request())
    assert result.end is not None
    assert result.end.speculation.reason is SpeculationReason.NOT_CONFIGURED


def test_low_acceptance_closes_and_probes_lead_back() -> None:
    engine = make(GateSettings(probe_interval_rounds=8), draft=BAD_DRAFT)
    key = engine.submit(request(max_tokens=1500, sampling=SamplingParams(temperature=0.0)))
    counters = engine.loop.counters
    while counters.rounds < 30:
        engine.step()
    assert engine.running(key).last_reason is SpeculationReason.LOW_ACCEPTANCE
    speculative, rounds = counters.speculative_steps, counters.rounds
    engine.step(80)
    probes = counters.speculative_steps - speculative
    assert 80 // 10 - 2 <= probes <= 80 // 8, f"{probes} probes in {counters.rounds - rounds} rounds"
    # The draft becomes good (a new process); probes notice and speculation is back for good.
    assert engine.transport is not None
    engine._draft = DRAFT
    engine.transport.kill_draft()
    engine.transport.start_draft()
    engine.step(40)
    speculative = counters.speculative_steps
    engine.step(20)
    assert counters.speculative_steps - speculative >= 18


def test_k_never_exceeds_any_limit() -> None:
    engine = make(GateSettings(max_num_draft_tokens=6), draft=TARGET, config=TargetConfig(max_draft_tokens_limit=4))
    engine.run(request(max_tokens=100))
    assert len(engine.loop.counters.verified_per_position) == 4
    engine = make(GateSettings(max_num_draft_tokens=6), draft=TARGET)
    engine.run(request(max_tokens=100, speculation=SpeculationChoice(max_tokens=2)))
    assert len(engine.loop.counters.verified_per_position) == 2


def test_nothing_is_drafted_that_could_not_be_committed() -> None:
    """K_eff = min(K, remaining - 1): with the oracle nothing is cut at the end."""
    for max_tokens in range(1, 20):
        engine = make(GateSettings(max_num_draft_tokens=5), draft=TARGET)
        (result,) = engine.run(request(max_tokens=max_tokens))
        assert len(result.token_ids) == max_tokens
        assert result.end is not None
        stats = result.end.speculation.stats
        assert stats.cut == 0
        assert stats.committed == stats.rounds + stats.accepted == max_tokens


@pytest.mark.parametrize(
    ("everyone", "own", "speculates", "reason"),
    [
        ({}, ClassPolicy(traffic_class="batch"), True, SpeculationReason.ON),
        ({}, ClassPolicy(traffic_class="batch", preference=OFF), False, SpeculationReason.OPERATOR_OFF),
        ({}, ClassPolicy(traffic_class="batch", max_num_draft_tokens=0), False, SpeculationReason.OPERATOR_OFF),
        ({}, ClassPolicy(traffic_class="other", preference=OFF), True, SpeculationReason.ON),
        ({"preference": OFF}, ClassPolicy(traffic_class="batch", preference=AUTO), True, SpeculationReason.ON),
        ({"batch_size_threshold": 0}, ClassPolicy(traffic_class="batch", preference=ON), True, SpeculationReason.ON),
    ],
)
def test_a_traffic_class_has_a_policy_of_its_own(
    everyone: dict[str, object], own: ClassPolicy, speculates: bool, reason: SpeculationReason
) -> None:
    engine = make(GateSettings(classes=(own,), **everyone))  # type: ignore[arg-type]
    key = engine.submit(replace(request(max_tokens=60), traffic_class="batch"))
    while engine.loop.scheduler.has_work:
        engine.step()
    end = engine.results[key].end
    assert end is not None
    assert (end.speculation.stats.verified > 0, end.speculation.reason) == (speculates, reason)


def test_a_class_takes_fewer_draft_tokens_within_one_step_of_the_change() -> None:
    engine = make(GateSettings(max_num_draft_tokens=5, min_acceptance_rate=0.0))
    engine.submit(replace(request(max_tokens=400), traffic_class="batch"))
    engine.step(10)
    assert len(engine.loop.counters.verified_per_position) == 5
    policy = ClassPolicy(traffic_class="batch", max_num_draft_tokens=2)
    engine.loop.gate.update(GateSettings(max_num_draft_tokens=5, min_acceptance_rate=0.0, classes=(policy,)))
    engine.step(2)
    longer = engine.loop.counters.verified_per_position[2:]
    verified = engine.loop.counters.verified
    engine.step(10)
    assert engine.loop.counters.verified_per_position[2:] == longer
    assert engine.loop.counters.verified > verified


def test_a_class_without_a_name_or_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="classes"):
        ClassPolicy(traffic_class="")
    with pytest.raises(ConfigError, match="twice"):
        GateSettings(classes=(ClassPolicy(traffic_class="a"), ClassPolicy(traffic_class="a")))

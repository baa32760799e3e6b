"""What the autoscaling policy asks for: through Serve's own wrapper, with its bounds and delays."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.autoscaling_state import ApplicationAutoscalingState
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from outrider.core.errors import ConfigError
from outrider.core.load import EngineLoad, LoadTargets
from outrider.core.scaling import follow, replicas_for
from outrider_cluster.assembly import load_targets
from outrider_cluster.scaling import application_policy, autoscaling_config, policy
from outrider_cluster.sections import AutoscalingSettings
from outrider_cluster.settings import Settings, default_settings


@pytest.mark.parametrize(
    ("demand", "current", "expected"),
    [
        (0.0, 1, 1),
        (1.0, 1, 1),
        (1.01, 1, 2),
        (3.7, 1, 4),
        (0.7 + 0.2 + 0.1, 1, 1),
        (1.0, 2, 2),  # would load one replica fully: the second stays
        (0.85, 2, 1),
        (3.0, 4, 4),
        (2.55, 4, 3),
        (0.0, 4, 1),
    ],
)
def test_replicas_follow_the_demand_and_do_not_flap(demand: float, current: int, expected: int) -> None:
    assert replicas_for(demand, current=current) == expected


@given(demand=st.floats(0, 100), current=st.integers(1, 64))
def test_a_constant_demand_settles_at_once(demand: float, current: int) -> None:
    settled = replicas_for(demand, current=current)
    assert replicas_for(demand, current=settled) == settled
    assert settled >= demand - 1e-6, "nobody is loaded above the wanted level"


@pytest.mark.parametrize(("leaders", "per_replica", "expected"), [(1, 1.0, 1), (4, 2.0, 2), (5, 2.0, 3), (0, 2.0, 1)])
def test_drafts_keep_their_ratio(leaders: int, per_replica: float, expected: int) -> None:
    assert follow(leaders, per_replica=per_replica) == expected


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (EngineLoad(), 0.0),
        (EngineLoad(running=10), 1.0),
        (EngineLoad(running=10, waiting=20), 3.0),
        (EngineLoad(running=2, kv_usage=0.8), 1.0),
        (EngineLoad(running=2, kv_usage=1.0), 1.25),
        (EngineLoad(running=2, waiting=1, queue_s=3.0), 1.5),
        (EngineLoad(running=2, waiting=1, queue_s=600.0), 2.0),
    ],
)
def test_the_scarcest_of_seats_kv_and_time_counts(load: EngineLoad, expected: float) -> None:
    assert LoadTargets(sequences=10, kv_usage=0.8, queue_s=2.0).demand(load) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["sequences", "kv_usage", "queue_s"])
def test_a_target_load_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LoadTargets(**({"sequences": 1.0} | {name: 0.0}))


def scaled(**sections: dict[str, Any]) -> Settings:
    values = default_settings().model_dump(mode="json")
    for name, section in sections.items():
        values[name] |= section
    return Settings.model_validate(values)


def test_the_wanted_load_is_a_share_of_the_seats() -> None:
    settings = scaled(target={"max_num_seqs": 8, "autoscaling": {"target_load": 0.5, "target_queue_s": 7.0}})
    assert load_targets(settings.target) == LoadTargets(sequences=4.0, kv_usage=0.8, queue_s=7.0)


def test_fixed_numbers_of_replicas_need_no_policy() -> None:
    assert application_policy(default_settings()) is None
    declared = application_policy(scaled(target={"autoscaling": {"max_replicas": 2}}))
    assert declared is not None
    served = AutoscalingPolicy(**declared).get_policy()  # type: ignore[no-untyped-call]
    assert served.__qualname__ == policy.__qualname__
    assert served.__module__ == policy.__module__


def test_a_mean_over_less_than_two_reports_is_refused() -> None:
    with pytest.raises(ValueError, match="look_back_s 5 must exceed measure_interval_s 5"):
        AutoscalingSettings(measure_interval_s=5, look_back_s=5)


class Fleet:
    """Serve's autoscaler of one application, fed by hand."""

    def __init__(self, **configs: AutoscalingSettings) -> None:
        self.state = ApplicationAutoscalingState("outrider")
        self.configs = {name: autoscaling_config(one) for name, one in configs.items()}
        self.replicas = {name: one.min_replicas for name, one in configs.items()}
        self.running = dict(self.replicas)
        self.demand = 0.0
        self.requests = 0.0
        self.now = 0.0
        declared = {"policy_function": "outrider_cluster.scaling:policy"}
        self.state.register(AutoscalingPolicy(**declared))  # type: ignore[no-untyped-call]
        self.policy_state: dict[Any, Any] = {}

    def tick(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        """Time passes; Serve asks its policy."""
        self.now += seconds
        monkeypatch.setattr("ray.serve.autoscaling_policy.time", SimpleNamespace(time=lambda: self.now))
        contexts = {DeploymentID(name=name, app_name="outrider"): self.context(name) for name in self.configs}
        wrapped: Any = self.state._policy
        decisions, self.policy_state = wrapped(contexts)
        for key, number in decisions.items():
            config = self.configs[key.name]
            self.replicas[key.name] = min(max(int(number), config.min_replicas), config.max_replicas or 1)
        return dict(self.replicas)

    def context(self, name: str) -> AutoscalingContext:
        running, config = self.running[name], self.configs[name]
        demand = {f"r{index}": self.demand / running for index in range(running)} if name == "Target" else {}
        made: Any = AutoscalingContext
        context: AutoscalingContext = made(
            deployment_id=name,
            deployment_name=name,
            app_name="outrider",
            current_num_replicas=running,
            target_num_replicas=self.replicas[name],
            running_replicas=[],
            total_num_requests=self.requests,
            total_queued_requests=0.0,
            aggregated_metrics={"demand": demand} if demand else {},
            raw_metrics={},
            capacity_adjusted_min_replicas=config.min_replicas,
            capacity_adjusted_max_replicas=config.max_replicas,
            policy_state=self.policy_state.get(DeploymentID(name=name, app_name="outrider"), {}),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=config,
        )
        return context


@pytest.fixture
def fleet() -> Fleet:
    delays = {"upscale_delay_s": 10.0, "downscale_delay_s": 60.0}
    return Fleet(
        Target=AutoscalingSettings(min_replicas=1, max_replicas=4, **delays),
        Draft=AutoscalingSettings(min_replicas=1, max_replicas=2, target_load=2.0, **delays),
        Router=AutoscalingSettings(min_replicas=1, max_replicas=3, target_load=10.0, **delays),
    )


def test_a_burst_adds_replicas_after_the_delay_and_drafts_after_the_targets(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.demand = 9.0
    assert fleet.tick(1, monkeypatch)["Target"] == 1
    assert fleet.tick(9.5, monkeypatch)["Target"] == 1, "ten seconds from the first wish on"
    assert fleet.tick(1, monkeypatch) == {"Target": 4, "Draft": 1, "Router": 1}, "the bound holds"
    fleet.running["Target"] = 4
    fleet.tick(1, monkeypatch)
    assert fleet.tick(11, monkeypatch) == {"Target": 4, "Draft": 2, "Router": 1}


def test_a_short_dip_removes_nothing_and_a_long_one_all_that_is_not_needed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.replicas |= {"Target": 4, "Draft": 2}
    fleet.running |= {"Target": 4, "Draft": 2}
    fleet.demand = 0.2
    fleet.tick(1, monkeypatch)
    assert fleet.tick(40, monkeypatch)["Target"] == 4
    fleet.demand = 4.0
    assert fleet.tick(10, monkeypatch)["Target"] == 4, "the clock of the dip starts anew"
    fleet.demand = 0.2
    fleet.tick(1, monkeypatch)
    assert fleet.tick(61, monkeypatch) == {"Target": 1, "Draft": 2, "Router": 1}
    assert fleet.tick(61, monkeypatch)["Draft"] == 2, "three targets still drain, and keep their drafts"
    fleet.running["Target"] = 1
    fleet.tick(1, monkeypatch)
    assert fleet.tick(61, monkeypatch)["Draft"] == 1


def test_without_any_report_nothing_changes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.replicas["Target"] = 3
    fleet.running["Target"] = 0  # all are restarting
    fleet.demand = 0.0
    monkeypatch.setattr(Fleet, "context", _silent(Fleet.context))
    for _ in range(10):
        assert fleet.tick(100, monkeypatch)["Target"] == 3


def _silent(context: Any) -> Any:
    def without_reports(self: Fleet, name: str) -> AutoscalingContext:
        self.running[name] = max(1, self.running[name])
        made = context(self, name)
        made._aggregated_metrics_value = {}
        return made  # type: ignore[no-any-return]

    return without_reports


def test_routers_follow_the_requests_that_serve_counts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.requests = 25.0
    fleet.tick(1, monkeypatch)
    assert fleet.tick(10, monkeypatch)["Router"] == 3

"""What changes live, what takes a restart, and that no field is accepted and ignored."""

from typing import Any

import pytest

from outrider_cluster.assembly import gate_settings, router_limits
from outrider_cluster.live import LIVE_FIELDS, fixed_difference
from outrider_cluster.sections import RouterSettings, SpeculationSettings
from outrider_cluster.settings import Settings, default_settings

OTHER: dict[str, Any] = {
    "preference": "off",
    "mode": "cached",
    "max_branches": 5,
    "max_num_draft_tokens": 3,
    "batch_size_threshold": 7,
    "batch_size_hysteresis": 5,
    "min_acceptance_rate": 0.9,
    "max_temperature": 0.5,
    "probe_interval_rounds": 9,
    "max_running_requests": 17,
    "max_running_requests_per_key": 3,
    "max_running_tokens": 999,
    "default_timeout_s": 5.0,
    "max_timeout_s": 2000.0,
}


def changed(section: str, **fields: Any) -> Settings:
    values = default_settings().model_dump(mode="json")
    values[section] |= fields
    return Settings.model_validate(values)


@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section in LIVE_FIELDS for name in LIVE_FIELDS[section]]
)
def test_every_live_field_reaches_what_the_router_applies(section: str, name: str) -> None:
    before, after = default_settings(), changed(section, **{name: OTHER[name]})
    assert fixed_difference(before, after) is None
    assert (gate_settings(before), router_limits(before)) != (gate_settings(after), router_limits(after))


@pytest.mark.parametrize(
    ("section", "fields", "named"),
    [
        ("model", {"max_model_len": 1024}, "model"),
        ("target", {"max_num_seqs": 4}, "target"),
        ("draft", {"enabled": False}, "draft"),
        ("speculation", {"max_draft_wait_ms": 1.0}, "speculation.max_draft_wait_ms"),
        ("speculation", {"ngram": {"enabled": True}}, "speculation.ngram"),
        ("router", {"num_cpus": 1.0}, "router.num_cpus"),
    ],
)
def test_what_was_built_in_takes_a_restart(section: str, fields: dict[str, Any], named: str) -> None:
    assert fixed_difference(default_settings(), changed(section, **fields)) == named


def test_equal_settings_differ_in_nothing() -> None:
    assert fixed_difference(default_settings(), default_settings()) is None


def test_live_fields_exist() -> None:
    assert LIVE_FIELDS["speculation"] <= set(SpeculationSettings.model_fields)
    assert LIVE_FIELDS["router"] <= set(RouterSettings.model_fields)

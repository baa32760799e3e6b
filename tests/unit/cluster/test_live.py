"""What changes live, what takes a restart, and that no field is accepted and ignored."""

from typing import Any

import pytest

from outrider_cluster.assembly import gate_settings, router_limits
from outrider_cluster.live import DRAFT_FIELDS, LIVE_FIELDS, Change, change_between, fixed_difference
from outrider_cluster.sections import DraftSettings, RouterSettings, SpeculationSettings
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
    "classes": {"batch": {"preference": "off"}},
    "max_running_requests": 17,
    "max_running_requests_per_key": 3,
    "max_running_tokens": 999,
    "default_timeout_s": 5.0,
    "max_timeout_s": 2000.0,
    "api_keys_file": "/keys.yaml",
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
    assert applied(before) != applied(after)


def applied(settings: Settings) -> tuple[object, ...]:
    """What `RouterIngress.reconfigure` reads."""
    return gate_settings(settings), router_limits(settings), settings.security


@pytest.mark.parametrize(
    ("section", "fields", "change", "named"),
    [
        ("model", {"max_model_len": 1024}, Change.ROLLING, "model.max_model_len"),
        ("model", {"served_name": "other"}, Change.RESTART, "model.served_name"),
        ("target", {"max_num_seqs": 4}, Change.ROLLING, "target.max_num_seqs"),
        ("draft", {"enabled": False}, Change.ROLLING, "draft.enabled"),
        ("draft", {"num_cpus": 2.0}, Change.ROLLING, "draft.num_cpus"),
        ("draft", {"model": "other"}, Change.DRAFT, "draft.model"),
        ("speculation", {"max_draft_wait_ms": 1.0}, Change.ROLLING, "speculation.max_draft_wait_ms"),
        ("speculation", {"ngram": {"enabled": True}}, Change.ROLLING, "speculation.ngram"),
        ("speculation", {"preference": "off"}, Change.LIVE, "speculation.preference"),
        ("router", {"num_cpus": 1.0}, Change.ROLLING, "router.num_cpus"),
        ("ray", {"graceful_shutdown_s": 3.0}, Change.RESTART, "ray.graceful_shutdown_s"),
        ("grpc", {"port": 9001}, Change.RESTART, "grpc.port"),
    ],
)
def test_every_change_says_what_it_takes(section: str, fields: dict[str, Any], change: Change, named: str) -> None:
    assert change_between(default_settings(), changed(section, **fields)) == (change, named)


def test_the_most_that_any_field_takes_counts() -> None:
    values = changed("speculation", preference="off").model_dump(mode="json")
    values["draft"]["model"] = "other"
    assert change_between(default_settings(), Settings.model_validate(values)) == (Change.DRAFT, "draft.model")
    values["target"]["max_num_seqs"] = 4
    assert change_between(default_settings(), Settings.model_validate(values)) == (
        Change.ROLLING,
        "target.max_num_seqs",
    )


def test_without_a_draft_section_the_draft_as_a_whole_is_new() -> None:
    values = default_settings().model_dump(mode="json")
    del values["draft"]
    assert change_between(Settings.model_validate(values), default_settings()) == (Change.ROLLING, "draft")


def test_another_draft_leaves_the_targets_alone() -> None:
    assert fixed_difference(default_settings(), changed("draft", model="other")) is None


def test_another_head_takes_other_targets_which_store_what_it_reads() -> None:
    values = default_settings().model_dump(mode="json")
    values["draft"] |= {"method": "eagle3", "model": "head-a", "quantization": "none"}
    before = Settings.model_validate(values)
    values["draft"]["model"] = "head-b"
    assert change_between(before, Settings.model_validate(values)) == (Change.ROLLING, "draft.model")


def test_equal_settings_differ_in_nothing() -> None:
    assert change_between(default_settings(), default_settings()) == (Change.NONE, "")


def test_live_fields_exist() -> None:
    assert LIVE_FIELDS["speculation"] <= set(SpeculationSettings.model_fields)
    assert LIVE_FIELDS["router"] <= set(RouterSettings.model_fields)
    assert DRAFT_FIELDS["draft"] <= set(DraftSettings.model_fields)

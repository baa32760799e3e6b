"""`draft.method: eagle3` in a configuration file: both sides hear of the head, and what cannot work is named."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.engine.tiny_heads import HIDDEN, save_random_head
from tests.unit.engine.tiny_models import CONFIGS, save_random_model

from outrider_cluster.assembly import draft_engine_config, target_engine_config
from outrider_cluster.live import Change, change_between
from outrider_cluster.memory import target_plan
from outrider_cluster.settings import Environment, Settings, default_settings

ENVIRONMENT = Environment(cache_dir=Path("cache"), auth_token="")
GIB = 1 << 30


def with_head(head: str, **sections: dict[str, Any]) -> Settings:
    values = default_settings().model_dump(mode="json")
    values["draft"] |= {"method": "eagle3", "model": head, "quantization": "none"}
    values["speculation"] |= {"mode": "sequential"}
    for name, section in sections.items():
        values[name] |= section
    return Settings.model_validate(values)


def test_target_and_draft_know_of_each_other() -> None:
    settings = with_head("owner/head")
    target = target_engine_config(settings, ENVIRONMENT)
    assert (target.kind, target.feature_head, target.head_of) == ("torch", "owner/head", None)
    assert settings.active_draft is not None
    draft = draft_engine_config(settings, settings.active_draft, ENVIRONMENT)
    assert (draft.kind, draft.model, draft.head_of) == ("eagle3", "owner/head", settings.model.name)


def test_a_draft_that_is_switched_off_costs_the_target_nothing() -> None:
    assert target_engine_config(with_head("head", draft={"enabled": False}), ENVIRONMENT).feature_head is None


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"draft": {"model": "self"}}, "draft.model: method eagle3 needs"),
        ({"draft": {"method": "draft_model", "model": "smollm2-eagle3"}}, "is an EAGLE-3 head; set draft.method"),
        ({"draft": {"quantization": "int4"}}, "draft.quantization: an eagle3 head"),
        ({"speculation": {"mode": "cached"}}, "speculation.mode: an eagle3 head"),
    ],
)
def test_what_cannot_work_is_named(sections: dict[str, dict[str, Any]], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        with_head("head", **sections)


def test_another_head_takes_other_targets_too() -> None:
    one, other = with_head("one"), with_head("other")
    assert change_between(one, other) == (Change.ROLLING, "draft.model")
    assert change_between(default_settings(), one)[0] is Change.ROLLING


def test_the_memory_plan_counts_stored_features(tmp_path: Path) -> None:
    save_random_model(tmp_path / "target", CONFIGS["llama"])
    save_random_head(tmp_path / "head")
    model = {"name": str(tmp_path / "target"), "max_model_len": 64}

    def block_bytes(settings: Settings) -> int:
        plan = target_plan(settings, ENVIRONMENT, lambda device: 16 * GIB, lambda text: None)
        assert plan is not None
        return plan.plan.block_bytes

    kv = {"block_size": 16, "num_blocks": 64, "cache_gib": None}
    without = with_head("head", model=model, target={"kv": kv}, draft={"enabled": False, "kv": kv})
    settings = with_head(str(tmp_path / "head"), model=model, target={"kv": kv}, draft={"kv": kv})
    assert block_bytes(settings) - block_bytes(without) == 16 * 2 * HIDDEN


def test_another_head_that_is_switched_off_leaves_the_target_alone() -> None:
    one, other = (with_head(name, draft={"enabled": False}) for name in ("one", "other"))
    assert change_between(one, other) == (Change.DRAFT, "draft.model")

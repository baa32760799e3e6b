"""Settings reach the parts that they are for."""

from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider_cluster.assembly import (
    draft_config,
    draft_engine_config,
    router_limits,
    supervision_policy,
    target_config,
    target_engine_config,
)
from outrider_cluster.settings import Environment, Settings, default_settings, load_settings

SERVE = Path(__file__).parents[3] / "infra" / "serve"
ENVIRONMENT = Environment(cache_dir=Path("cache"), auth_token="")


def changed(settings: Settings, **sections: dict[str, object]) -> Settings:
    values = settings.model_dump(mode="json")
    for name, section in sections.items():
        values[name] |= section
    return Settings.model_validate(values)


@pytest.mark.parametrize("path", sorted(SERVE.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_configures_every_part(path: Path) -> None:
    settings = load_settings(path)
    target_engine_config(settings, ENVIRONMENT)
    target_config(settings)
    router_limits(settings)
    supervision_policy(settings)
    assert settings.active_draft is not None
    draft_engine_config(settings, settings.active_draft, ENVIRONMENT)
    draft_config(settings, settings.active_draft)


def test_the_reference_group_runs_on_gpus_with_its_own_draft() -> None:
    settings = load_settings(SERVE / "h100-4plus1.yaml")
    target = target_engine_config(settings, ENVIRONMENT)
    assert (target.device, target.tensor_parallel_size, target.dtype) == ("cuda", 4, "bfloat16")
    assert target.kv_bytes == 24 * 2**30
    assert settings.active_draft is not None
    draft = draft_engine_config(settings, settings.active_draft, ENVIRONMENT)
    assert (draft.device, draft.model) == ("cuda", "meta-llama/Llama-3.2-1B-Instruct")


def test_how_steps_run_on_a_gpu_is_a_matter_of_settings() -> None:
    settings = load_settings(SERVE / "h100-4plus1.yaml")
    cuda = {"graphs": "startup", "graph_batch_sizes": [1, 4], "graph_widths": [1, 8]}
    target = target_engine_config(changed(settings, target={"cuda": cuda}), ENVIRONMENT)
    assert (target.cuda_graphs, target.graph_batch_sizes, target.graph_widths) == ("startup", (1, 4), (1, 8))
    assert settings.active_draft is not None
    slow = changed(settings, draft={"cuda": {"attention": "gather"}}).active_draft
    assert slow is not None
    assert draft_engine_config(settings, slow, ENVIRONMENT).attention == "gather"


def test_a_self_draft_loads_the_targets_weights_in_int4() -> None:
    settings = default_settings()
    assert settings.active_draft is not None
    draft = draft_engine_config(settings, settings.active_draft, ENVIRONMENT)
    assert (draft.model, draft.quantization) == (settings.model.name, "int4")


def test_a_scripted_draft_agrees_as_often_as_configured() -> None:
    settings = load_settings(SERVE / "scripted.yaml")
    target = target_engine_config(settings, ENVIRONMENT)
    assert settings.active_draft is not None
    draft = draft_engine_config(settings, settings.active_draft, ENVIRONMENT)
    assert target.scripted is not None
    assert draft.scripted is not None
    assert (target.scripted.agreement, draft.scripted.agreement) == (1.0, 0.8)
    assert target.scripted.seed == draft.scripted.seed


def test_ngrams_reach_the_engine_only_when_they_are_on() -> None:
    settings = default_settings()
    assert target_config(settings).prompt_lookup_max == 0
    on = changed(settings, speculation={"ngram": {"enabled": True, "prompt_lookup_max": 6}})
    assert target_config(on).prompt_lookup_max == 6


def test_without_any_proposer_requests_may_not_ask_for_draft_tokens() -> None:
    settings = changed(default_settings(), draft={"enabled": False})
    assert router_limits(settings).max_num_speculative_tokens == 0


def test_a_prefill_chunk_never_exceeds_a_step() -> None:
    settings = changed(default_settings(), target={"max_num_batched_tokens": 32, "prefill_chunk_tokens": 512})
    assert target_config(settings).prefill_chunk_tokens == 32


def test_int4_with_the_wrong_dtype_is_refused_by_name() -> None:
    settings = changed(default_settings(), draft={"dtype": "float32"})
    assert settings.active_draft is not None
    with pytest.raises(ConfigError, match="bfloat16"):
        draft_engine_config(settings, settings.active_draft, ENVIRONMENT)

"""`infra/serve/emulated.yaml` without Ray: the parts that a deployment starts, put together by hand."""

from pathlib import Path

import pytest
from tests.support.fleet import fleet

from outrider.core.errors import ConfigError
from outrider.core.generation import GenerationRequest
from outrider.engine.emulated.device import h100_llama_1b, h100_tp4_llama_70b, slowed
from outrider_cluster.assembly import draft_engine_config, target_engine_config
from outrider_cluster.settings import EMULATED_PREFIX, Environment, load_settings, parse_settings

pytestmark = pytest.mark.timeout(60)

FILE = Path(__file__).parents[2] / "infra" / "serve" / "emulated.yaml"


async def test_it_serves_drafts_and_says_that_it_is_emulated() -> None:
    async with fleet(load_settings(FILE), targets=["a"], drafts=1) as made:
        results = [await made.generate(GenerationRequest(text=f"{i} OF 3", max_tokens=60)) for i in range(3)]
        assert (await made.router.model_info("")).model.startswith(EMULATED_PREFIX)
    for result in results:
        assert result.accepted.model.startswith(EMULATED_PREFIX)
        assert result.choices[0].end.usage.completion_tokens == 60
    stats = results[-1].choices[0].end.speculation.stats
    assert stats.speculative_rounds > 0
    assert stats.accepted > 0


def test_profile_acceptance_and_slowdown_reach_both_engines() -> None:
    text = FILE.read_text().replace("acceptance: 0.8", "acceptance: 0.6\n  slowdown: 4")
    settings = parse_settings(text, origin="f.yaml")
    assert settings.active_draft is not None
    environment = Environment(cache_dir=Path("cache"), auth_token="")
    target = target_engine_config(settings, environment).emulated
    draft = draft_engine_config(settings, settings.active_draft, environment).emulated
    assert target is not None
    assert draft is not None
    assert (target.role, draft.role) == ("target", "draft")
    assert target.text == draft.text
    assert target.text.acceptance == 0.6
    assert target.device.step_s(rows=8) == pytest.approx(4 * h100_tp4_llama_70b().step_s(rows=8))
    assert draft.device.step_s(rows=1) == pytest.approx(4 * h100_llama_1b().step_s(rows=1))


def test_a_device_at_its_own_speed_is_unchanged_and_a_stopped_one_refused() -> None:
    assert slowed(h100_llama_1b(), 1.0) == h100_llama_1b()
    with pytest.raises(ConfigError, match="slowdown"):
        slowed(h100_llama_1b(), 0.0)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("name: emulated-llama-70b", "name: llama-70b", "model.served_name"),
        ("kv: {block_size: 16, num_blocks: 8192}", "kv: {cache_gib: 4}", "num_blocks"),
        ("max_num_seqs: 64", "max_num_seqs: 64\n  tensor_parallel_size: 4", "tensor_parallel_size"),
        ("num_cpus: 0.5", "num_cpus: 0.5\n  quantization: int4", "quantization"),
        ("h100-llama-1b", "h200-llama-1b", "draft_profile"),
    ],
)
def test_what_an_emulation_cannot_be_is_refused_by_name(old: str, new: str, named: str) -> None:
    text = FILE.read_text()
    assert text.count(old) == 1
    with pytest.raises(ConfigError, match=named):
        parse_settings(text.replace(old, new), origin="f.yaml")

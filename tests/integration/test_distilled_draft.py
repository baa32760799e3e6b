"""A distilled draft at work: the tool's output in the local stack, the shipped one in transformers too."""

from pathlib import Path

import pytest
import torch
from tests.unit.distill.tiny_target import save_tiny_target
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.result import GenerationResult
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.engine.models.prepare import default_cache_dir, prepare
from outrider.engine.tokenizer import Tokenizer
from outrider.local.config import LocalSettings, model_settings
from outrider.local.stack import local_stack
from outrider_cluster.cli import app

TARGET, DRAFT = "smollm2-135m", "smollm2-draft"
QUESTION = "Write a Python function that adds two numbers."


def settings(model: str, draft: str) -> LocalSettings:
    return model_settings(model=model, draft=draft, dtype="float32", max_model_len=160, num_seqs=1)


async def generated(one: LocalSettings, preference: SpeculationPreference, temperature: float) -> GenerationResult:
    async with local_stack(one) as stack:
        return await stack.generate(
            GenerationRequest(
                messages=(ChatMessage(role="user", content=QUESTION),),
                max_tokens=24,
                temperature=temperature,
                seed=3,
                speculation=SpeculationChoice(preference=preference),
            )
        )


async def texts_with_and_without(one: LocalSettings, temperature: float) -> tuple[GenerationResult, GenerationResult]:
    on = await generated(one, SpeculationPreference.ON, temperature)
    off = await generated(one, SpeculationPreference.OFF, temperature)
    return on, off


@pytest.mark.timeout(240)
async def test_what_the_command_makes_is_accepted_as_a_draft(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    options = {
        "--target": str(tmp_path / "target"),
        "--output": str(tmp_path / "draft"),
        "--minutes": "0.1",
        "--layers": "2",
        "--vocabulary": "200",
        "--slots": "16",
        "--max-tokens": "24",
        "--dtype": "float32",
        "--threads": "1",
        "--held-out": "chat",
    }
    result = CliRunner().invoke(app, ["distill", *(part for pair in options.items() for part in pair)])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "draft") in result.output
    on, off = await texts_with_and_without(settings(str(tmp_path / "target"), str(tmp_path / "draft")), 1.0)
    assert on.choices[0].token_ids == off.choices[0].token_ids
    assert on.choices[0].end.speculation.stats.drafted > 0


@pytest.mark.timeout(300)
async def test_the_shipped_draft_changes_no_text_and_is_often_right() -> None:
    on, off = await texts_with_and_without(settings(TARGET, DRAFT), 0.0)
    assert on.choices[0].token_ids == off.choices[0].token_ids
    assert on.choices[0].end.speculation.stats.accepted > 0


@pytest.mark.timeout(300)
def test_the_shipped_draft_assists_in_plain_transformers() -> None:
    folders = [prepare(name, default_cache_dir(), lambda text: None) for name in (TARGET, DRAFT)]
    target, draft = (AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32) for folder in folders)
    tokenizer = Tokenizer(folders[0])
    ids = tokenizer.encode_chat([ChatMessage(role="user", content=QUESTION)], continue_final_message=False)
    prompt = torch.tensor([ids])
    limits = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = target.generate(prompt, **limits)
    assisted = target.generate(prompt, assistant_model=draft, **limits)
    assert assisted.tolist() == plain.tolist()

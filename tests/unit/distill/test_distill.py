"""The whole tool on a tiny random target: what it writes, that it learns, and that it resumes."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.distill.tiny_target import TOKENIZER_SIZE, VOCAB_SIZE, save_tiny_target
from transformers import AutoModelForCausalLM

import outrider.distill.evaluate_stage
from outrider.core.errors import ConfigError
from outrider.distill.batches import TextBatches
from outrider.distill.narrow import make_narrow_student
from outrider.distill.pipeline import DistillReport, distill
from outrider.distill.prompts import user_turn
from outrider.distill.records import RecordStore, TokenKind
from outrider.distill.run_state import RunState
from outrider.distill.sample_stage import engine_for
from outrider.distill.settings import DistillSettings, StageMinutes
from outrider.distill.student import kept_layers, make_student
from outrider.distill.training import Trainer, TrainingSettings
from outrider.distill.training_loop import TrainingProgress
from outrider.distill.vocabulary import DraftVocabulary
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine

PROMPTS = tuple(user_turn(f"question {number}?") for number in range(200))


def settings(folder: Path, **changes: Any) -> DistillSettings:
    base = DistillSettings(
        target=str(folder / "target"),
        output=folder / "draft",
        minutes=StageMinutes(sample=0.001, train=0.02),
        prompts=PROMPTS[:16],
        held_out={"held": ("What else?", "And then?")},
        dtype="float32",
        num_layers=2,
        vocabulary_size=100,
        max_new_tokens=24,
        num_slots=16,
        top_k=4,
    )
    return replace(base, **changes)


def run(one: DistillSettings) -> tuple[DistillReport, list[str]]:
    stages: list[str] = []
    return distill(one, lambda stage, share, words: stages.append(stage), lambda text: None), stages


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistillReport]:
    folder = tmp_path_factory.mktemp("distill")
    save_tiny_target(folder / "target")
    return folder, run(settings(folder))[0]


def test_the_output_is_a_folder_that_transformers_loads(made: tuple[Path, DistillReport]) -> None:
    folder, report = made
    model = AutoModelForCausalLM.from_pretrained(str(report.folder))
    target = AutoModelForCausalLM.from_pretrained(str(folder / "target"))
    assert model.config.num_hidden_layers == 2
    shared = model.get_input_embeddings().weight.float()
    torch.testing.assert_close(shared, target.get_input_embeddings().weight, rtol=0.01, atol=0.01)
    for name in ("tokenizer.json", "draft_vocabulary.json", "README.md", "distill.json"):
        assert (report.folder / name).is_file()


def test_the_engine_computes_the_own_vocabulary_only(made: tuple[Path, DistillReport]) -> None:
    _, report = made
    ids = json.loads((report.folder / "draft_vocabulary.json").read_text())["token_ids"]
    assert len(ids) == 100
    engine = build_engine(EngineConfig(model=str(report.folder), num_blocks=4, max_model_len=32), lambda text: None)
    one = ForwardSlice(token_ids=[3, 1, 4], start=0, block_table=[0, 1], num_logits=3)
    logits = engine.forward(ForwardBatch(slices=(one,)))
    assert logits.shape == (3, VOCAB_SIZE)
    assert (logits > -torch.inf).any(0).nonzero().squeeze(1).tolist() == ids
    plain = AutoModelForCausalLM.from_pretrained(str(report.folder), dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.tensor([[3, 1, 4]])).logits[0]
    torch.testing.assert_close(logits[:, ids], expected[:, ids], rtol=0, atol=1e-4)


def test_the_card_has_command_data_and_acceptance(made: tuple[Path, DistillReport]) -> None:
    _, report = made
    card = (report.folder / "README.md").read_text()
    assert "outrider distill" in card
    assert "16 prompts (16 given)" in card
    assert [(one.name, one.temperature) for one in report.acceptance] == [("held", 0.0), ("held", 1.0)]
    figures = json.loads((report.folder / "distill.json").read_text())
    assert figures["training"]["steps"] == report.training.steps > 0
    assert {one["name"] for one in figures["acceptance"]} == {"held"}


def test_the_records_are_the_targets_own_words(made: tuple[Path, DistillReport]) -> None:
    folder, _ = made
    store = RecordStore(folder / "draft" / "work" / "samples")
    prefix = store.prefix()
    target = AutoModelForCausalLM.from_pretrained(str(folder / "target"))
    texts = [one for one in store.texts() if one.temperature == 0]
    assert texts
    for one in texts[:3]:
        with torch.inference_mode():
            logits = target(torch.cat([prefix, one.ids]).long()[None]).logits[0, len(prefix) :]
        torch.testing.assert_close(one.top_logp.float(), logits.log_softmax(-1).topk(4).values, rtol=0, atol=5e-2)
        answer = (one.kind[:-1] == TokenKind.ANSWER).nonzero().squeeze(1)
        assert one.ids[answer + 1].tolist() == logits[answer, :TOKENIZER_SIZE].argmax(-1).tolist()


def test_a_stage_that_is_done_is_not_done_again(made: tuple[Path, DistillReport]) -> None:
    folder, report = made
    again, stages = run(settings(folder))
    assert set(stages) == {"evaluate"}
    assert again.training.steps == report.training.steps
    longer, stages = run(settings(folder, minutes=StageMinutes(sample=0.001, train=0.03)))
    assert set(stages) == {"train", "evaluate"}
    assert longer.training.steps > report.training.steps


def test_without_prompts_the_target_asks_itself(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    report, _ = run(settings(tmp_path, prompts=(), held_out={}))
    texts = list(RecordStore(tmp_path / "draft" / "work" / "samples").texts())
    assert texts
    assert all((one.kind == TokenKind.USER).any() for one in texts)
    assert report.acceptance == ()


def test_training_raises_agreement_and_resumes_where_it_was(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    run(settings(tmp_path, prompts=PROMPTS[:64], num_slots=64, held_out={}))
    store = RecordStore(tmp_path / "draft" / "work" / "samples")
    texts = list(store.texts())
    vocabulary = DraftVocabulary.of_texts(texts, size=200, full_size=VOCAB_SIZE, always=())
    batches = TextBatches(texts, store.prefix(), vocabulary, batch_tokens=400, seed=3)

    def train(steps: int, checkpoint: Path) -> tuple[Trainer, TrainingProgress]:
        told: list[TrainingProgress] = []
        torch.manual_seed(0)
        student = make_student(target, kept_layers(3, 3))
        with torch.no_grad():
            for parameter in student.get_decoder().layers.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        head = student.get_output_embeddings().weight.detach()[vocabulary.token_ids].clone()
        trainer = Trainer(
            student,
            head,
            # One second a step, and the whole schedule in every run.
            TrainingSettings(minutes=steps / 60, warmup_steps=1, learning_rate=3e-3),
            checkpoint,
            itertools.count().__next__,
        )
        trainer.run(batches, told.append)
        return trainer, told[-1]

    before, _ = train(1, tmp_path / "one.pt")
    after, last = train(40, tmp_path / "forty.pt")
    assert last.steps == 40
    assert after.report(batches).held_out_agreement > before.report(batches).held_out_agreement + 0.1

    resumed, last = train(50, tmp_path / "forty.pt")
    assert last.steps == 50
    assert resumed.report(batches).tokens > after.report(batches).tokens


def test_a_narrow_draft_starts_from_principal_components(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    student, projection = make_narrow_student(target, num_layers=2, hidden_size=32)
    hidden = torch.randn(5, 64)
    table = target.get_output_embeddings().weight.detach()
    # The best approximation of that rank, by the theorem of Eckart and Young.
    left, values, right = torch.linalg.svd(table, full_matrices=False)
    best = hidden @ (left[:, :32] * values[:32] @ right[:32]).T
    torch.testing.assert_close(hidden @ projection @ student.get_output_embeddings().weight.T, best, rtol=0, atol=1e-3)

    report, _ = run(settings(tmp_path, hidden_size=32, held_out={}))
    loaded = AutoModelForCausalLM.from_pretrained(str(report.folder))
    assert (loaded.config.hidden_size, loaded.config.num_attention_heads) == (32, 2)
    with pytest.raises(ConfigError, match="hidden_size: 64 is outside"):
        make_narrow_student(target, num_layers=2, hidden_size=64)


def test_one_text_is_too_little_to_train_on(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    with pytest.raises(ConfigError, match="too few to train on"):
        run(settings(tmp_path, prompts=PROMPTS[:1], num_slots=1, minutes=StageMinutes(sample=1e-9, train=0.01)))


@pytest.mark.parametrize("field", ["num_layers", "vocabulary_size", "num_slots", "top_k", "threads"])
def test_settings_are_checked_by_name(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        settings(tmp_path, **{field: 0})


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "s0000.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match=r"s0000\.safetensors: cannot read"):
        list(RecordStore(tmp_path).texts())


def test_a_class_without_held_out_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held_out: code has no prompts"):
        settings(tmp_path, held_out={"code": ()})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"method": "eagle3", "num_layers": None},
            "--method: eagle3, but what lies in .*work was made with draft_model; go on with that, or",
        ),
        ({"num_layers": 1}, "--layers: 1, but .* made with 2; .*delete training.pt, vocabulary.json there"),
        ({"vocabulary_size": 50}, "--vocabulary: 50, but"),
        ({"hidden_size": 32}, "--hidden-size: 32, but"),
    ],
)
def test_what_texts_or_checkpoint_do_not_belong_to_is_refused(
    made: tuple[Path, DistillReport], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(settings(made[0], **changes))


def test_texts_serve_another_training_once_the_old_one_is_deleted(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    run(settings(tmp_path, held_out={}))
    for name in ("training.pt", "vocabulary.json"):
        (tmp_path / "draft" / "work" / name).unlink()
    report, stages = run(settings(tmp_path, num_layers=1, held_out={}))
    assert set(stages) == {"train"}
    assert AutoModelForCausalLM.from_pretrained(str(report.folder)).config.num_hidden_layers == 1


def test_a_head_has_no_channels_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_size: of a draft model"):
        settings(tmp_path, method="eagle3", num_layers=None, hidden_size=32)
    with pytest.raises(ConfigError, match=r"num_layers \(--layers\): of a draft model"):
        settings(tmp_path, method="eagle3", num_layers=4)


def test_the_usual_number_of_layers_given_or_not_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "training.pt").touch()
    state = RunState(tmp_path)
    state.claim(settings(tmp_path, num_layers=4), sampled=True)
    state.claim(settings(tmp_path, num_layers=None), sampled=True)
    with pytest.raises(ConfigError, match=r"--layers: 2, but what lies in .* was made with 4"):
        state.claim(settings(tmp_path, num_layers=2), sampled=True)


def test_a_head_that_an_earlier_version_bound_to_layers_goes_on(tmp_path: Path) -> None:
    (tmp_path / "head.pt").touch()
    head = settings(tmp_path, method="eagle3", num_layers=None)
    before = {"target": head.target, "method": "eagle3", "num_layers": 6, "hidden_size": 9, "vocabulary_size": 100}
    (tmp_path / "settings.json").write_text(json.dumps(before))
    RunState(tmp_path).claim(head, sampled=True)
    with pytest.raises(ConfigError, match="--vocabulary: 50, but"):
        RunState(tmp_path).claim(replace(head, vocabulary_size=50), sampled=True)


def test_a_stop_in_training_loses_no_step(tmp_path: Path) -> None:
    """What asks to stop is no `Exception`; it may come at any moment between two steps' updates."""

    class Stop(BaseException):
        pass

    save_tiny_target(tmp_path / "target")
    steps: list[str] = []

    def listen(stage: str, share: float, words: str) -> None:
        if stage == "train":
            steps.append(words)
            if len(steps) == 3:
                raise Stop

    with pytest.raises(Stop):
        distill(settings(tmp_path, held_out={}), listen, lambda text: None)
    state = torch.load(tmp_path / "draft" / "work" / "training.pt", weights_only=True)
    assert state["steps"] == 3
    report, _ = run(settings(tmp_path, held_out={}))
    assert report.training.steps > 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_layers": 9}, "num_layers: 9 is outside"),
        ({"hidden_size": 640}, "hidden_size: 640 is outside"),
        ({"device": "nowhere"}, "device: nowhere: "),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_sampled(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    save_tiny_target(tmp_path / "target")
    with pytest.raises(ConfigError, match=problem):
        run(settings(tmp_path, **changes))
    assert not (tmp_path / "draft").exists()


def test_a_draft_named_like_a_packaged_one_is_itself_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`smollm2-draft` alone is the name of the shipped draft, also where a folder of that name lies."""
    save_tiny_target(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    loaded: list[str] = []

    @contextmanager
    def noted(one: DistillSettings, model: str, **sizes: Any) -> Iterator[ModelEngine]:
        loaded.append(model)
        with engine_for(one, model, **sizes) as engine:
            yield engine

    monkeypatch.setattr(outrider.distill.evaluate_stage, "engine_for", noted)
    run(settings(tmp_path, output=Path("smollm2-draft")))
    assert loaded == [str(tmp_path / "target"), str(tmp_path / "smollm2-draft")]

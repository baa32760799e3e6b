"""A head is trained the way it is used: the loss sees what serving computes, and the tool learns."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.distill.tiny_target import VOCAB_SIZE, save_tiny_target
from tests.unit.engine.tiny_heads import HIDDEN, VOCAB, random_weights, reference_logits, save_random_head
from tests.unit.engine.tiny_models import random_tokens

from outrider.core.errors import ConfigError
from outrider.distill.eagle3_evaluation import round_acceptance_by_depth
from outrider.distill.eagle3_loss import HeadBatch, HeadLossWeights, head_loss, head_outputs
from outrider.distill.eagle3_stage import rotary_of
from outrider.distill.eagle3_training import HeadTrainer, HeadTraining
from outrider.distill.pipeline import DistillReport, distill
from outrider.distill.prompts import user_turn
from outrider.distill.records import RecordStore
from outrider.distill.settings import DistillSettings, StageMinutes
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.config import EngineConfig
from outrider.engine.eagle3.checkpoint import load_head
from outrider.engine.eagle3.config import Eagle3Shape, load_head_config
from outrider.engine.eagle3.model import Eagle3Head
from outrider.engine.factory import build_engine

LENGTH = 9
DEPTHS = 3


def head_of(folder: Path) -> Eagle3Head:
    save_random_head(folder)
    return load_head(folder, Eagle3Shape.of_config(load_head_config(folder)))[0]


def test_every_depth_equals_serving_with_features_up_to_there(tmp_path: Path) -> None:
    """At depth d, row p is what the formulas give when features end d positions before p."""
    head, weights = head_of(tmp_path), random_weights()
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(VOCAB, HIDDEN, generator=generator)
    features = torch.randn(LENGTH, 3 * HIDDEN, generator=generator)
    tokens = random_tokens(LENGTH)
    shifted = torch.cat((torch.zeros(1, 3 * HIDDEN), features[:-1]))
    cos_sin = rotary_of(tmp_path, table)(LENGTH)
    outputs = list(head_outputs(head, table[tokens][None], shifted[None], cos_sin, depths=DEPTHS))
    fused = features @ weights["fc.weight"].T
    for depth, p in itertools.product(range(DEPTHS), range(1, LENGTH)):
        if p > depth:
            _, expected = reference_logits(weights, table, tokens[: p + 1], fused[: p - depth])
            torch.testing.assert_close(outputs[depth][0, p], expected[-1], rtol=0, atol=2e-4)


def random_batch(head: Eagle3Head, *, texts: int = 4) -> HeadBatch:
    generator = torch.Generator().manual_seed(5)
    shape = (texts, LENGTH)
    return HeadBatch(
        embeddings=torch.randn(*shape, HIDDEN, generator=generator),
        features=torch.randn(*shape, 3 * HIDDEN, generator=generator),
        teacher_ids=torch.randint(0, head.shape.draft_vocab_size, (*shape, 3), generator=generator),
        teacher_probs=torch.tensor([0.6, 0.3, 0.1]).expand(*shape, 3),
        teacher_hidden=torch.randn(*shape, HIDDEN, generator=generator),
        weight=torch.ones(shape),
        num_tokens=texts * LENGTH,
    )


def test_what_cannot_be_drafted_teaches_no_choice(tmp_path: Path) -> None:
    head = head_of(tmp_path)
    batch = random_batch(head)
    unknown = replace(batch, teacher_probs=torch.zeros_like(batch.teacher_probs))
    cos_sin = rotary_of(tmp_path, batch.embeddings)(LENGTH)
    only = HeadLossWeights(likeliest=1.0, law=1.0, hidden=0.0)
    loss = head_loss(head, unknown, cos_sin, depths=2, weights=only)
    assert float(loss.loss) == 0.0
    assert loss.agreed == (0.0, 0.0)
    # Row 0 has no features, and one row more is lost with every depth.
    assert loss.rows == (4 * (LENGTH - 1), 4 * (LENGTH - 2))


def test_a_head_learns_by_heart_what_it_is_shown(tmp_path: Path) -> None:
    head = head_of(tmp_path)
    head.requires_grad_(True)
    batch = random_batch(head)
    cos_sin = rotary_of(tmp_path, batch.embeddings)(LENGTH)
    weights = HeadLossWeights()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        result = head_loss(head, batch, cos_sin, depths=DEPTHS, weights=weights)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(float(result.loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert result.agreed[0] / result.rows[0] > 0.8


def test_blocks_are_walked_depth_by_depth() -> None:
    first = [True, True, False, True, True]
    second = [False, True, True, True, False]
    third = [False, False, False, True, True]
    shares, mean_length = round_acceptance_by_depth([[first, second, third]], k=3)
    # Round 1 takes tokens 0 and 1 and fails at 2; round 2 takes 3 and fails at 4, where the text ends.
    assert shares == (1.0, 0.5, 0.0)
    assert mean_length == 2.5


def settings(folder: Path) -> DistillSettings:
    return DistillSettings(
        target=str(folder / "target"),
        output=folder / "head",
        minutes=StageMinutes(sample=0.001, train=0.03),
        method="eagle3",
        prompts=tuple(user_turn(f"question {number}?") for number in range(16)),
        held_out={"held": ("What else?", "And then?")},
        dtype="float32",
        vocabulary_size=100,
        max_new_tokens=24,
        num_slots=16,
        top_k=4,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistillReport]:
    folder = tmp_path_factory.mktemp("eagle3")
    save_tiny_target(folder / "target")
    return folder, distill(settings(folder), lambda stage, share, words: None, lambda text: None)


def test_the_tool_makes_a_head_that_the_engine_runs(made: tuple[Path, DistillReport]) -> None:
    folder, report = made
    engine = build_engine(
        EngineConfig(
            model=str(report.folder), kind="eagle3", head_of=str(folder / "target"), num_blocks=4, max_model_len=32
        ),
        lambda text: None,
    )
    one = ForwardSlice(token_ids=[3, 1, 4], start=0, block_table=[0, 1], num_logits=1)
    logits = engine.forward(ForwardBatch(slices=(one,)))
    assert logits.shape == (1, VOCAB_SIZE)
    assert int((logits > -torch.inf).sum()) == 100
    assert [(one.name, one.temperature) for one in report.acceptance] == [("held", 0.0), ("held", 1.0)]
    assert report.training.steps > 0
    assert "EAGLE-3 head" in (report.folder / "README.md").read_text()


def test_a_second_run_goes_on_where_the_first_stopped(made: tuple[Path, DistillReport]) -> None:
    folder, report = made
    longer = replace(settings(folder), minutes=StageMinutes(sample=0.001, train=0.05))
    again = distill(longer, lambda stage, share, words: None, lambda text: None)
    assert again.training.steps > report.training.steps


def test_texts_without_features_are_refused(tmp_path: Path, made: tuple[Path, DistillReport]) -> None:
    folder, _ = made
    store = RecordStore(folder / "head" / "work" / "samples")
    texts = [replace(one, features=None) for one in store.texts()]
    other = RecordStore(tmp_path / "head" / "work" / "samples")
    other.append(texts, store.prefix())
    (tmp_path / "target").symlink_to(folder / "target")
    (tmp_path / "head" / "work" / "sampled.json").write_text('{"seconds": 9.0}')
    with pytest.raises(ConfigError, match="have no features"):
        distill(settings(tmp_path), lambda stage, share, words: None, lambda text: None)


@pytest.mark.parametrize("name", ["minutes", "learning_rate", "depths", "batch_tokens"])
def test_settings_of_training_are_checked_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        HeadTraining(**({"minutes": 1.0} | {name: 0}))  # type: ignore[arg-type]


def test_the_first_token_is_trained_before_the_others(tmp_path: Path) -> None:
    trainer = HeadTrainer(
        head_of(tmp_path).requires_grad_(True),
        rotary_of(tmp_path, torch.zeros(1)),
        HeadTraining(minutes=1.0, depths=3),
        tmp_path / "none.pt",
        lambda: 0.0,
    )
    assert [trainer.depths_at(one) for one in (0.0, 0.5, 0.7, 0.9, 1.0)] == [1, 1, 2, 3, 3]

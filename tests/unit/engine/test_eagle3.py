"""An EAGLE-3 head computes what its paper says, over paged KV, from weights in the published format."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.tiny_heads import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    VOCAB,
    random_weights,
    reference_logits,
    save_random_head,
)
from tests.unit.engine.tiny_models import CONFIGS, random_tokens, save_random_model
from torch import Tensor

from outrider.core.errors import CompatibilityError, ConfigError, EngineUnavailable
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.config import EngineConfig
from outrider.engine.eagle3.checkpoint import load_head, save_head
from outrider.engine.eagle3.config import Eagle3Shape, default_feature_layers, load_head_config
from outrider.engine.eagle3.engine import Eagle3Engine
from outrider.engine.factory import build_engine
from outrider.engine.models.heads import is_head
from outrider.engine.torch_engine import TorchEngine
from outrider.local.config import model_settings

BLOCK = 4
TABLE = [5, 2, 9, 0, 7, 3]
OTHER = [1, 4, 6, 8, 10, 11]
TOLERANCE = 2e-4


def silent(text: str) -> None:
    """Shows nothing."""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    save_random_model(tmp_path / "target", CONFIGS["llama"])
    save_random_head(tmp_path / "head")
    return tmp_path / "target", tmp_path / "head"


def build(target: Path, head: Path, **changes: object) -> Eagle3Engine:
    fields: dict[str, object] = {"block_size": BLOCK, "num_blocks": 16, "max_model_len": 24} | changes
    engine = build_engine(
        EngineConfig(model=str(head), kind="eagle3", head_of=str(target), **fields),  # type: ignore[arg-type]
        silent,
    )
    assert isinstance(engine, Eagle3Engine)
    return engine


def packed(rows: Tensor) -> bytes:
    return rows.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def features(count: int, *, seed: int = 1) -> Tensor:
    """Numbers that bfloat16 holds exactly, so that both sides compute from the same."""
    rows = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return rows.to(torch.bfloat16).float()


def run(engine: Eagle3Engine, *slices: tuple[list[int], int, list[int], int]) -> Tensor:
    return engine.forward(
        ForwardBatch(
            slices=tuple(
                ForwardSlice(token_ids=tokens, start=start, block_table=table, num_logits=count)
                for tokens, start, table, count in slices
            )
        )
    )


def drafted(logits: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The columns that the head has; all others must be -inf."""
    ids = weights["d2t"] + torch.arange(DRAFT_VOCAB)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[ids] = False
    assert (logits[:, others] == -torch.inf).all()
    return logits[:, ids]


def embedding_of(target: Path) -> Tensor:
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


def test_rows_over_features_and_over_own_outputs_equal_the_formulas(folders: tuple[Path, Path]) -> None:
    weights, tokens, fused = load_file(folders[1] / "model.safetensors"), random_tokens(14), features(9)
    engine = build(*folders)
    engine.write_features(TABLE, 0, packed(fused))
    # Ten tokens are committed: nine features are known, and the last row gives the first draft's law.
    chunks = [run(engine, (tokens[:6], 0, TABLE, 0)), run(engine, (tokens[6:10], 6, TABLE, 1))]
    assert len(chunks[0]) == 0
    steps = [chunks[1], *(run(engine, (tokens[p : p + 1], p, TABLE, 1)) for p in range(10, 14))]
    expected, _ = reference_logits(weights, embedding_of(folders[0]), tokens, fused)
    torch.testing.assert_close(drafted(torch.cat(steps), weights), expected[8:], rtol=0, atol=TOLERANCE)


def test_features_replace_what_was_drafted(folders: tuple[Path, Path]) -> None:
    """A verdict: two of three drafted tokens were accepted; their features come and their rows run again."""
    weights, fused = load_file(folders[1] / "model.safetensors"), features(13)
    tokens, other = random_tokens(14), random_tokens(6, seed=9)
    engine = build(*folders)
    engine.write_features(TABLE, 0, packed(fused[:9]))
    run(engine, (tokens[:10], 0, TABLE, 1))
    run(engine, (other[:1], 10, TABLE, 1))
    run(engine, (other[1:2], 11, TABLE, 1))
    engine.write_features(TABLE, 9, packed(fused[9:12]))
    logits = torch.cat([run(engine, (tokens[10:13], 10, TABLE, 1)), run(engine, (tokens[13:], 13, TABLE, 1))])
    expected, _ = reference_logits(weights, embedding_of(folders[0]), tokens, fused[:12])
    torch.testing.assert_close(drafted(logits, weights), expected[11:], rtol=0, atol=TOLERANCE)


def test_sequences_in_one_batch_do_not_meet(folders: tuple[Path, Path]) -> None:
    weights, table = load_file(folders[1] / "model.safetensors"), embedding_of(folders[0])
    first, second = random_tokens(9), random_tokens(17, seed=5)
    engine = build(*folders)
    engine.write_features(TABLE, 0, packed(features(8)))
    engine.write_features(OTHER, 0, packed(features(16, seed=2)))
    logits = run(engine, (first, 0, TABLE, 2), (second, 0, OTHER, 3))
    expected = torch.cat(
        [
            reference_logits(weights, table, first, features(8))[0][-2:],
            reference_logits(weights, table, second, features(16, seed=2))[0][-3:],
        ]
    )
    torch.testing.assert_close(drafted(logits, weights), expected, rtol=0, atol=TOLERANCE)


def test_the_first_token_has_no_row_of_its_own(folders: tuple[Path, Path]) -> None:
    engine = build(*folders)
    assert run(engine, ([7], 0, TABLE, 1)).eq(0).all()
    engine.write_features(TABLE, 0, packed(features(1)))
    both = run(engine, ([7, 3], 0, TABLE, 2), ([9], 0, OTHER, 1))
    assert both[0].eq(0).all()
    assert both[2].eq(0).all()
    assert torch.isfinite(both[1]).sum() == DRAFT_VOCAB


def test_a_fork_takes_kv_and_inputs_along(folders: tuple[Path, Path]) -> None:
    tokens = random_tokens(8)
    engine = build(*folders)
    engine.write_features(TABLE, 0, packed(features(6)))
    run(engine, (tokens[:7], 0, TABLE, 1))
    engine.copy_blocks(list(zip(TABLE[:2], OTHER[:2], strict=True)))
    own, forked = run(engine, (tokens[7:], 7, TABLE, 1)), run(engine, (tokens[7:], 7, OTHER, 1))
    torch.testing.assert_close(own, forked)
    with pytest.raises(ValueError, match="block id"):
        engine.copy_blocks([(0, 99)])


def test_bad_features_are_refused_and_a_closed_engine_says_so(folders: tuple[Path, Path]) -> None:
    engine = build(*folders)
    with pytest.raises(ValueError, match="whole rows"):
        engine.write_features(TABLE, 0, b"abc")
    with pytest.raises(ValueError, match="do not hold"):
        engine.write_features(TABLE[:1], 3, packed(features(2)))
    engine.close()
    with pytest.raises(EngineUnavailable):
        run(engine, ([1, 2], 0, TABLE, 1))


def test_the_target_stores_the_fused_inputs_of_three_layers(folders: tuple[Path, Path]) -> None:
    target, head = folders
    config = EngineConfig(model=str(target), feature_head=str(head), block_size=BLOCK, num_blocks=16, max_model_len=24)
    engine = build_engine(config, silent)
    assert isinstance(engine, TorchEngine)
    plain = save_random_model(target, CONFIGS["llama"])
    tokens = random_tokens(15)
    for start, end in ((0, 6), (6, 11), (11, 15)):
        one = ForwardSlice(token_ids=tokens[start:end], start=start, block_table=TABLE, num_logits=1)
        engine.forward(ForwardBatch(slices=(one,)))
    with torch.inference_mode():
        states = plain(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    joined = torch.cat([states[layer][0] for layer in LAYERS], dim=-1)
    expected = joined @ load_file(head / "model.safetensors")["fc.weight"].T
    assert engine.features is not None
    payload = bytearray(engine.features.read(TABLE, 2, 13))
    stored = torch.frombuffer(payload, dtype=torch.bfloat16).view(11, HIDDEN).float()
    torch.testing.assert_close(stored, expected[2:13], rtol=0.01, atol=0.02)


@pytest.mark.parametrize("pickled", [False, True])
def test_published_files_are_read(tmp_path: Path, pickled: bool) -> None:
    weights = save_random_head(tmp_path, pickled=pickled)
    head, embedding = load_head(tmp_path, Eagle3Shape.of_config(load_head_config(tmp_path)))
    assert embedding is None
    torch.testing.assert_close(head.fc.weight.detach(), weights["fc.weight"])
    assert head.target_ids.tolist() == weights["t2d"].nonzero().flatten().tolist()


def test_a_head_may_bring_its_embedding_and_the_whole_vocabulary(tmp_path: Path) -> None:
    weights = save_random_head(tmp_path, draft_vocab_size=VOCAB)
    del weights["d2t"], weights["t2d"]
    weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    save_file(weights, tmp_path / "model.safetensors")
    head, embedding = load_head(tmp_path, Eagle3Shape.of_config(load_head_config(tmp_path)))
    assert head.target_ids.tolist() == list(range(VOCAB))
    assert embedding is not None
    torch.testing.assert_close(embedding, weights["embed_tokens.weight"])


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    save_random_head(tmp_path / "one")
    config = load_head_config(tmp_path / "one")
    head, _ = load_head(tmp_path / "one", Eagle3Shape.of_config(config))
    save_head(head, config.to_dict(), tmp_path / "two", torch.float32)
    again, _ = load_head(tmp_path / "two", Eagle3Shape.of_config(load_head_config(tmp_path / "two")))
    for name, weight in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "lack fc.weight"),
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias, which"),
        ({"lm_head.weight": torch.zeros(7, HIDDEN)}, "lm_head.weight is"),
        ({"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}, "d2t names ids outside"),
        ({"t2d": torch.zeros(VOCAB, dtype=torch.bool)}, "d2t and t2d"),
        ({"embed_tokens.weight": torch.zeros(3, HIDDEN)}, "embed_tokens.weight is"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    save_random_head(tmp_path)
    weights = {name: one for name, one in (random_weights() | change).items() if one is not None}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CompatibilityError, match=message):
        load_head(tmp_path, Eagle3Shape.of_config(load_head_config(tmp_path)))


def test_a_head_for_another_target_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head_of"):
        EngineConfig(model="head", kind="eagle3", num_blocks=4)
    save_random_head(tmp_path / "wide", target_hidden_size=32)
    with pytest.raises(CompatibilityError, match="width 32"):
        build(folders[0], tmp_path / "wide")
    save_random_head(tmp_path / "deep", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 8]})
    with pytest.raises(CompatibilityError, match="reads layers"):
        build(folders[0], tmp_path / "deep")
    save_random_head(tmp_path / "ids", vocab_size=VOCAB + 1)
    with pytest.raises(CompatibilityError, match="129 ids"):
        build(folders[0], tmp_path / "ids")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((tmp_path / "ids" / "config.json").read_text())
    with pytest.raises(ConfigError, match="no weights"):
        load_head(tmp_path / "empty", Eagle3Shape.of_config(load_head_config(tmp_path / "empty")))
    with pytest.raises(CompatibilityError, match="draft_vocab_size"):
        Eagle3Shape.of_config(load_head_config(folders[0]))


def test_a_folder_says_whether_it_is_a_head(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert is_head(str(folders[1]))
    assert is_head("smollm2-eagle3")
    assert not is_head(str(folders[0]))
    assert not is_head(str(tmp_path / "nothing"))
    assert not is_head("owner/model")
    settings = model_settings(
        model=str(folders[0]), draft=str(folders[1]), dtype="float32", max_model_len=64, num_seqs=1
    )
    assert settings.draft is not None
    assert (settings.draft.kind, settings.target.feature_head) == ("eagle3", str(folders[1]))


def test_the_published_choice_of_layers() -> None:
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(3) == (0, 1, 2)
    with pytest.raises(CompatibilityError, match="2 layers"):
        default_feature_layers(2)

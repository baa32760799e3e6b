"""The model card: what the draft was made from, by which command, and what it is worth."""

import json
from collections.abc import Sequence

from outrider.distill.evaluation import ClassAcceptance
from outrider.distill.records import LabelledText, RecordStore
from outrider.distill.settings import DistillSettings
from outrider.distill.training_loop import TrainingReport

__all__ = ["write_card"]

_FIGURES = "distill.json"


def write_card(
    settings: DistillSettings,
    store: RecordStore,
    training: TrainingReport,
    acceptance: Sequence[ClassAcceptance],
    *,
    licence: str,
    k: int,
) -> None:
    """Write README.md and distill.json, the same figures for programs, into the output folder."""
    texts = list(store.texts())
    lines = [
        "---",
        f"license: {licence}",
        f"base_model: {settings.target}",
        "tags: [speculative-decoding, draft-model]",
        "---",
        "",
        f"# {settings.output.name}: a draft for {settings.target}",
        "",
        *_description(settings),
        "",
        "```sh",
        settings.command,
        "```",
        "",
        f"- data: {_data(texts, settings)}",
        f"- labels: the target's {settings.top_k} likeliest tokens and last hidden state at every position",
        f"- training: {training.steps} steps, {training.tokens:,} tokens seen with repetitions, "
        f"{_minutes(training.seconds)} on {settings.device}, seed {settings.seed}",
        _origin(settings),
        f"- licence: that of the target, {licence}",
        "",
        "## Acceptance",
        "",
        *_table(acceptance, k),
        "",
        f"On texts like the training data, but not trained on: {training.held_out_agreement:.3f} of the likeliest "
        "tokens agree.",
        "",
    ]
    (settings.output / "README.md").write_text("\n".join(lines), encoding="utf-8")
    figures = {
        "command": settings.command,
        "target": settings.target,
        "texts": len(texts),
        "tokens": sum(len(one) for one in texts),
        "training": {
            "steps": training.steps,
            "tokens": training.tokens,
            "seconds": round(training.seconds, 1),
            "held_out_agreement": training.held_out_agreement,
        },
        "acceptance": [one.as_json() for one in acceptance],
    }
    (settings.output / _FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 600 else f"{seconds / 60:.1f} minutes"


def _description(settings: DistillSettings) -> list[str]:
    if settings.method == "eagle3":
        return [
            "An EAGLE-3 head in the format that its authors publish, made by `outrider distill` from its target's own "
            "answers and features. It has no embedding and no tokenizer of its own: it runs beside its target."
        ]
    return [
        f"A Llama model of {settings.draft_layers} layers for speculative decoding, made by `outrider distill` from "
        "its target's own answers. Alone it writes nonsense; what it is for is to guess the target's next tokens."
    ]


def _origin(settings: DistillSettings) -> str:
    if settings.method == "eagle3":
        return (
            f"- it proposes {settings.vocabulary_size} of the target's ids (`d2t`), by rows of the target's own output "
            "head; the rest starts at random and is trained over its own outputs as well (training-time test)"
        )
    if settings.hidden_size is not None:
        return (
            f"- {settings.hidden_size} channels; embeddings and output head are the target's, projected to their "
            f"principal components; layers from scratch; it proposes {settings.vocabulary_size} of the target's ids"
        )
    return (
        "- its first layers, embeddings and output head come from the target (the last two unchanged); it proposes "
        f"{settings.vocabulary_size} of the target's ids (`draft_vocabulary.json`); other software reads the folder as "
        "a standard model with the full head"
    )


def _data(texts: Sequence[LabelledText], settings: DistillSettings) -> str:
    counts: dict[str, int] = {}
    for one in texts:
        name = one.prompt_class.name.lower()
        counts[name] = counts.get(name, 0) + 1
    greedy = sum(one.temperature == 0 for one in texts)
    by_class = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return (
        f"{len(texts)} prompts ({by_class}) with answers sampled from the target, {greedy} of them greedy, "
        f"{sum(len(one) for one in texts):,} tokens"
    )


def _table(acceptance: Sequence[ClassAcceptance], k: int) -> list[str]:
    if not acceptance:
        return ["Not measured: there were no held-out prompts."]
    positions = " | ".join(f"position {index + 1}" for index in range(k))
    lines = [
        f"Held-out prompts, rounds of {k} tokens. *First position*: share of the target's tokens that the draft names, "
        "given the text before them. *Position j*: chance that the j-th token of a block is accepted once those before "
        "it are. At temperature 1 under the coupled rule; the last column is what the ratio test would accept.",
        "",
        f"| prompts | temperature | first position | {positions} | tokens a round | rejection rule |",
        "|" + "---|" * (k + 5),
    ]
    for one in acceptance:
        reached = [f"{share:.2f}" for share in one.per_position]
        shares = " | ".join([*reached, *["–"] * (k - len(reached))])
        ratio = "–" if one.rejection is None else f"{one.rejection:.3f}"
        lines.append(
            f"| {one.name} | {one.temperature:g} | {one.first:.3f} | {shares} | {one.mean_length:.2f} | {ratio} |"
        )
    return lines

"""Hit rate of outcome tables against temperature, for both verification rules, on the logits of a real pair.

    python infra/benchmarks/hit_rates.py [--draft int4|smollm2-draft] [--json FILE] [--streams 16] [--tokens 120]

The target (SmolLM2-135M) writes texts token by token; at each position the draft says what it would draw
and how it ranks the others, with the code that serves. Rounds are then cut out of these positions: a block
of K is accepted up to the draft's first mistake, and its outcome hits if it is among the B likeliest that
`outrider.draft.outcomes` picks, with acceptance learned as the draft learns it. Guesses behind a mistake
come from the committed text instead of the block; they count for the order of outcomes alone.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "services"))

import torch

from outrider.core.generation import ChatMessage
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.keys import derive_key
from outrider.decoding.propose import ProposedToken, ProposeRow, propose
from outrider.decoding.verify import VerifyRow, verify
from outrider.draft.acceptance import AcceptanceModel
from outrider.draft.outcomes import Guess, InFlight, likely_outcomes
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine
from outrider.engine.models.prepare import prepare
from outrider.engine.tokenizer import Tokenizer

MODEL = "smollm2-135m"
MAX_LEN, BLOCK_SIZE, NUM_RANKED, Q_TOP_K = 320, 16, 7, 32
COUPLED, REJECTION = VerificationRule.COUPLED, VerificationRule.REJECTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What the draft thought of one position, and what was committed there."""

    guess: Guess
    drafted: int
    accepted: bool
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one rule and temperature."""

    rule: str
    temperature: float
    positions: int
    acceptance: float
    k: int
    branches: int
    hit_rate: float
    mean_acceptance_length: float


class Stream:
    """One text under way, with KV blocks of its own on both engines."""

    def __init__(self, index: int, prompt: list[int], sampling: SamplingParams, rule: VerificationRule) -> None:
        per_stream = MAX_LEN // BLOCK_SIZE
        self.table = range(index * per_stream, (index + 1) * per_stream)
        self.text = list(prompt)
        self.prompt_len = len(prompt)
        self.key = derive_key(1, index)
        self.sampling, self.rule = sampling, rule
        self.written = 0
        self.positions: list[Position] = []

    def slice(self) -> ForwardSlice:
        """The part of the text that has no KV yet."""
        return ForwardSlice(
            token_ids=self.text[self.written :], start=self.written, block_table=self.table, num_logits=1
        )

    def draft_row(self) -> ProposeRow:
        """How the draft draws the next token."""
        return ProposeRow(
            sampling=self.sampling,
            prefix=self.text,
            prompt_len=self.prompt_len,
            noise_key=self.key,
            rule=self.rule,
            q_top_k=Q_TOP_K,
            num_ranked=NUM_RANKED,
        )

    def verify_row(self, token: ProposedToken) -> VerifyRow:
        """A block of one. The row behind it is there for its shape; what it draws is not looked at."""
        return VerifyRow(
            sampling=self.sampling,
            prefix=self.text,
            prompt_len=self.prompt_len,
            noise_key=self.key,
            draft_token_ids=(token.token_id,),
            draft_laws=(token.law,) if token.law is not None else (),
            rule=self.rule,
        )

    def commit(self, token: ProposedToken, committed: tuple[int, ...]) -> None:
        """Note the position and append its token."""
        guess = Guess(ranked=token.ranked_token_ids, margin=token.margin)
        self.positions.append(
            Position(guess=guess, drafted=token.token_id, accepted=len(committed) == 2, committed=committed[0])
        )
        self.written = len(self.text)
        self.text.append(committed[0])


def write(target: ModelEngine, draft: ModelEngine, streams: list[Stream], num_tokens: int, vocab: int) -> None:
    """Let the target write so many tokens of every stream, with the draft looking on."""
    for _ in range(num_tokens):
        batch = ForwardBatch(slices=tuple(one.slice() for one in streams))
        p, q = target.forward(batch), draft.forward(batch)
        tokens = propose(q, [one.draft_row() for one in streams], vocab)
        rows = [one.verify_row(token) for one, token in zip(streams, tokens, strict=True)]
        verdicts = verify(p.repeat_interleave(2, 0), rows, vocab)
        for one, token, verdict in zip(streams, tokens, verdicts, strict=True):
            one.commit(token, verdict.token_ids)


def hits(
    positions: list[Position], model: AcceptanceModel, k: int, branches: int, *, sampled: bool
) -> tuple[int, int, int]:
    """Rounds, rounds whose outcome was in the table, and tokens accepted."""
    rounds = found = accepted = at = 0
    while at + k < len(positions):
        window = positions[at : at + k + 1]
        length = next((j for j, one in enumerate(window[:k]) if not one.accepted), k)
        in_flight = InFlight(
            base_len=1,
            block_id=1,
            token_ids=tuple(one.drafted for one in window[:k]),
            num_draft_tokens=k,
            branch_budget=branches,
            sampled=sampled,
            budget_s=0.0,
            launched_at=0.0,
            guesses=[one.guess for one in window],
        )
        table = likely_outcomes(in_flight, model, frozenset(), branches)
        outcome = (length, window[length].committed)
        found += outcome in {(one.num_accepted, one.next_token_id) for one in table}
        for one in window[: length + 1]:
            model.learn(one.guess.margin, one.guess.rank_of(one.committed))
        for one in window[: min(length + 1, k)]:
            model.learn_acceptance(accepted=one.accepted)
        rounds, accepted, at = rounds + 1, accepted + length, at + length + 1
    return rounds, found, accepted


def figures(streams: list[Stream], rule: VerificationRule, temperature: float, k: int, branches: int) -> Figures:
    """Everything about one run of the streams, cut into rounds of K."""
    model = AcceptanceModel()
    sampled = rule is REJECTION and temperature > 0
    sums = [hits(one.positions, model, k, branches, sampled=sampled) for one in streams]
    rounds, found, accepted = (sum(column) for column in zip(*sums, strict=True))
    seen = [position for one in streams for position in one.positions]
    return Figures(
        rule="greedy" if temperature == 0 else rule.value,
        temperature=temperature,
        positions=len(seen),
        acceptance=sum(one.accepted for one in seen) / len(seen),
        k=k,
        branches=branches,
        hit_rate=found / rounds,
        mean_acceptance_length=1 + accepted / rounds,
    )


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Chat questions of the benchmark's own set."""
    lines = (Path(__file__).parent / "prompts" / "chat.jsonl").read_text().splitlines()[:count]
    texts = [json.loads(line)["prompt"] for line in lines]
    return [
        tokenizer.encode_chat([ChatMessage(role="user", content=one)], continue_final_message=False) for one in texts
    ]


def main() -> None:
    """Run every rule and temperature; a table to the standard output, JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", choices=("int4", "smollm2-draft"), default="int4")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperatures", default="0,0.5,1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = options.streams * MAX_LEN // BLOCK_SIZE
    config = EngineConfig(
        model=MODEL, dtype="bfloat16", num_blocks=blocks, block_size=BLOCK_SIZE, max_model_len=MAX_LEN
    )
    folder = prepare(MODEL, config.cache_dir, lambda _: None)
    tokenizer = Tokenizer(folder)
    changes = {"quantization": "int4"} if options.draft == "int4" else {"model": options.draft}
    target, draft = (build_engine(one, lambda _: None) for one in (config, replace(config, **changes)))
    rows: list[Figures] = []
    print(f"{'rule':10s} {'T':>4s} {'acceptance':>10s} {'K':>2s} {'B':>3s} {'hit rate':>8s} {'tokens/round':>12s}")
    for temperature in map(float, options.temperatures.split(",")):
        for rule in (COUPLED,) if temperature == 0 else (COUPLED, REJECTION):
            sampling = SamplingParams(temperature=temperature)
            texts = prompts(tokenizer, options.streams)
            streams = [Stream(index, text, sampling, rule) for index, text in enumerate(texts)]
            write(target, draft, streams, options.tokens, tokenizer.vocab_size)
            for k, branches in ((5, 24), (7, 24), (5, 3)):
                row = figures(streams, rule, temperature, k, branches)
                rows.append(row)
                print(
                    f"{row.rule:10s} {row.temperature:4.1f} {row.acceptance:10.3f} {k:2d} {branches:3d} "
                    f"{row.hit_rate:8.3f} {row.mean_acceptance_length:12.2f}",
                    flush=True,
                )
    if options.json is not None:
        report = {"target": MODEL, "draft": options.draft, "rows": [asdict(one) for one in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Stage three: acceptance on held-out prompts, greedy and sampled, from the engines that serve."""

from collections.abc import Callable, Sequence

from outrider.distill.evaluation import ClassAcceptance, acceptance_of
from outrider.distill.requests import held_out_requests
from outrider.distill.sample_stage import engine_for
from outrider.distill.sampling import Sampler
from outrider.distill.settings import DistillSettings
from outrider.engine.loading import load_config
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve
from outrider.engine.shape import ModelShape
from outrider.engine.tokenizer import Tokenizer

__all__ = ["EVALUATED_K", "evaluate_draft"]

EVALUATED_K = 5
"""Draft tokens a round."""
_NEW_TOKENS = 64
_MAX_PROMPT_TOKENS = 512
_TEMPERATURES = (0.0, 1.0)
_SLOTS = 16


def evaluate_draft(
    settings: DistillSettings, tokenizer: Tokenizer, *, tell: Callable[[float], None], progress: Progress
) -> list[ClassAcceptance]:
    """Acceptance by class and temperature of the draft in the output folder. Nothing without held-out prompts."""
    cases = [(t, name) for t in _TEMPERATURES for name in settings.held_out]
    if not cases:
        return []
    folder = resolve(settings.target, settings.cache_dir, progress)
    # Absolute: a bare name may be that of a packaged model, which would be measured instead.
    made = str(settings.output.resolve())
    max_len = min(_MAX_PROMPT_TOKENS + _NEW_TOKENS, ModelShape.of_config(load_config(folder)).max_positions)
    results: list[ClassAcceptance] = []
    with (
        engine_for(settings, settings.target, num_slots=_SLOTS, max_len=max_len, progress=progress) as target,
        engine_for(settings, made, num_slots=1, max_len=max_len, progress=progress) as draft,
    ):
        sampler = Sampler(
            target,
            num_slots=_SLOTS,
            max_len=max_len,
            end_ids=frozenset(tokenizer.eos_token_ids),
            num_valid_ids=tokenizer.vocab_size,
        )
        for done, (temperature, name) in enumerate(cases):

            def tell_part(share: float, done: int = done) -> None:
                tell((done + share) / len(cases))

            prompts: Sequence[str] = settings.held_out[name]
            requests = held_out_requests(prompts, tokenizer, max_new_tokens=_NEW_TOKENS, temperature=temperature)
            results += acceptance_of(
                target,
                draft,
                sampler,
                {name: requests},
                k=EVALUATED_K,
                num_valid_ids=tokenizer.vocab_size,
                tell=tell_part,
            )
    return results

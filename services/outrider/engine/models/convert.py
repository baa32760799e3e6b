"""Turn a GGUF file into a standard Hugging Face folder, and prove that the result answers right.

Weights are saved in float32. Dequantised Q4_1 values (scale times nibble plus minimum, in half
precision) are not all representable in bfloat16; a float32 folder holds them exactly, so a float32
engine computes with the published weights, and a bfloat16 engine rounds once, when it loads.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from outrider.core.errors import ConfigError
from outrider.engine.models.catalogue import PackagedModel

__all__ = ["convert_gguf", "verify_folder"]

_PROBE_NEW_TOKENS = 12


def convert_gguf(model: PackagedModel, weights: Path, folder: Path) -> None:
    """Write config, tokenizer and float32 safetensors of `weights` into `folder`.

    Raises `ConfigError` when the file does not hold exactly the weights that its architecture has.
    """
    source = str(weights.parent)
    # The tensors are put into a fresh model, rather than loaded by from_pretrained, because that
    # demands another package and leaves the model marked as quantised, which cannot be saved.
    config = AutoConfig.from_pretrained(source, gguf_file=weights.name)
    loaded = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(weights), return_tensors=True, model_to_load=loaded)["tensors"]
    missing, unexpected = loaded.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ConfigError(f"model {model.name!r}: weights missing {missing}, unexpected {unexpected}")
    loaded.tie_weights()
    loaded.save_pretrained(str(folder))
    _convert_tokenizer(model, weights, folder)


def _convert_tokenizer(model: PackagedModel, weights: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(weights.parent), gguf_file=weights.name)
    if model.splits_digits:
        # GGUF has no field for the digit splitter, and without it numbers tokenise differently
        # from the original model, hence from a draft of the same family.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(str(folder))


def verify_folder(model: PackagedModel, folder: Path) -> None:
    """Answer the probe prompt greedily; raises `ConfigError` if the known answer does not come."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    turn = [{"role": "user", "content": model.probe_prompt}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = loaded.generate(**prompt, max_new_tokens=_PROBE_NEW_TOKENS, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if not answer.startswith(model.probe_answer):
        raise ConfigError(
            f"model {model.name!r}: the converted model answers {answer!r} to {model.probe_prompt!r} "
            f"instead of {model.probe_answer!r}; the conversion is wrong"
        )

"""Write a draft as a standard Hugging Face folder, with the vocabulary that it proposes from."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.engine.draft_vocabulary import DRAFT_VOCABULARY

__all__ = ["save_draft"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save_draft(student: Any, token_ids: torch.Tensor, *, target_folder: Path, output: Path) -> None:
    """Save a student in bfloat16 beside the target's tokenizer. The student's weights become bfloat16.

    transformers, vLLM and others read the folder as the model it is, with the full output head; our
    engine computes the head's rows of `token_ids` alone.
    """
    output.mkdir(parents=True, exist_ok=True)
    student.to(torch.bfloat16)
    student.config.dtype = torch.bfloat16
    student.save_pretrained(str(output))
    for name in _TOKENIZER_FILES:
        if (target_folder / name).is_file():
            shutil.copyfile(target_folder / name, output / name)
    text = json.dumps({"token_ids": token_ids.tolist()}, separators=(",", ":"))
    (output / DRAFT_VOCABULARY).write_text(text + "\n", encoding="utf-8")

"""A byte-level tokenizer small enough to read: every byte a token, a few words, two special tokens."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import PreTrainedTokenizerFast

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ð", "°")]
SPECIAL = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'villain' %}{{ raise_exception('no villains') }}{% endif %}"
    "<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


def save_byte_tokenizer(folder: Path, *, merges: list[tuple[str, str]] = MERGES) -> None:
    """Save it as a Hugging Face tokenizer folder."""
    tokens = [*sorted(ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)
    fast.save_pretrained(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, len(tokens) + 1]}))

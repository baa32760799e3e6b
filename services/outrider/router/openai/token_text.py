"""How single tokens are written in log-probabilities, in both of OpenAI's shapes."""

from collections.abc import Sequence
from typing import Any, Protocol

from outrider.core.verdict import TokenLogprobs

__all__ = ["TokenBytes", "TokenTexts"]

_LOWEST = -9999.0
"""What stands for minus infinity, which JSON cannot hold. vLLM's value."""


class TokenBytes(Protocol):
    """The part of the tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; not always whole characters."""
        ...


class TokenTexts:
    """Writes tokens and their log-probabilities. Holds no state."""

    def __init__(self, tokens: TokenBytes, *, as_ids: bool) -> None:
        """`as_ids`: write `token_id:ID` instead of the text."""
        self._tokens = tokens
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token's text; a part of a character reads as `bytes:\\xe2\\x80`, so that no two look alike."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokens.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The shape of chat completions: one entry for each token."""
        content = [
            {
                **self._entry(token_id, one.logprob),
                "top_logprobs": [self._entry(other, logprob) for other, logprob in one.top],
            }
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The shape of completions: parallel lists. `offset`: characters of the tokens before these."""
        texts = [self.text(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._top(token_id, one) for token_id, one in zip(token_ids, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokens.token_bytes(token_id)
        return {"token": self.text(token_id), "logprob": _finite(logprob), "bytes": list(data)}

    def _top(self, token_id: int, one: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the one that was taken, as OpenAI does: one more entry at most."""
        return {self.text(other): _finite(logprob) for other, logprob in (*one.top, (token_id, one.logprob))}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)

"""Text for clients without what is nobody's business: file paths of this machine."""

import re

__all__ = ["without_paths"]

_PATH = re.compile(r"(?<![\w./-])(?:file://|~|\.{1,2})?/(?:[^\s/'\":,;()\[\]]+/)*[^\s/'\":,;()\[\]]+/?")
_PLACEHOLDER = "(path)"


def without_paths(text: str) -> str:
    """The text with every absolute or relative file path replaced. Model ids like `owner/name` stay."""
    return _PATH.sub(_PLACEHOLDER, text)

"""Which drafts are EAGLE-3 heads: those that ship with this package, and folders that say so."""

import json
from pathlib import Path

__all__ = ["is_head", "shipped_head", "shipped_heads"]

_SHIPPED = Path(__file__).parent / "shipped"
_HEADS = ("smollm2-eagle3",)


def shipped_heads() -> tuple[str, ...]:
    """Short names of the heads that ship with this package."""
    return _HEADS


def shipped_head(name: str) -> Path | None:
    """The folder of the shipped head of that name, if it is one. It is complete as it lies there."""
    return _SHIPPED / name if name in _HEADS else None


def is_head(name_or_path: str) -> bool:
    """Whether a draft is a head, as far as can be told without a download: a shipped one, or a local folder."""
    if shipped_head(name_or_path) is not None:
        return True
    path = Path(name_or_path).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and any("Eagle3" in str(name) for name in config.get("architectures") or ())

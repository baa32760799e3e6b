"""Options that are lists. Apart from the options of a benchmark: those load torch."""

from collections.abc import Callable
from typing import TypeVar

from outrider.core.errors import ConfigError

__all__ = ["listed"]

T = TypeVar("T")


def listed(option: str, text: str, convert: Callable[[str], T]) -> tuple[T, ...]:
    """Comma-separated values of an option. Raises `ConfigError` naming it."""
    try:
        return tuple(convert(one.strip()) for one in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error

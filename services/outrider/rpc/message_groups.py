"""Consecutive items that fit into one message."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

__all__ = ["MAX_GROUP_BYTES", "in_groups"]

MAX_GROUP_BYTES = 1 << 20
"""More than this travels in several messages; a single larger item travels alone."""

P = TypeVar("P", bound=Message)


def in_groups(items: Iterable[P]) -> Iterator[list[P]]:
    """Cut into runs of at most `MAX_GROUP_BYTES`, in order, none empty."""
    group: list[P] = []
    size = 0
    for item in items:
        item_size = item.ByteSize()
        if group and size + item_size > MAX_GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += item_size
    if group:
        yield group

"""Features of many rows in messages of bounded size. Each chunk stands for itself: it says its position."""

from collections.abc import Iterator

from outrider.core import link
from outrider.rpc.enums import protocol_error
from outrider.v1 import speculation_pb2 as pb

__all__ = ["MAX_FEATURE_BYTES", "feature_chunks", "features_from_proto"]

MAX_FEATURE_BYTES = 1 << 19
"""Bytes of a chunk; a single larger row travels alone."""


def feature_chunks(event: link.Features) -> Iterator[pb.Features]:
    """Cut into whole rows, at most `MAX_FEATURE_BYTES` together."""
    row_bytes = len(event.payload) // event.num_rows
    step = max(1, MAX_FEATURE_BYTES // row_bytes)
    for start in range(0, event.num_rows, step):
        count = min(step, event.num_rows - start)
        yield pb.Features(
            handle=event.handle,
            first_position=event.first_position + start,
            num_rows=count,
            payload=event.payload[start * row_bytes : (start + count) * row_bytes],
        )


def features_from_proto(message: pb.Features) -> link.Features:
    """Convert a chunk. Raises `ProtocolError` when it holds no whole rows."""
    if not message.num_rows or not message.payload or len(message.payload) % message.num_rows:
        raise protocol_error("features.payload", f"{len(message.payload)} bytes are not {message.num_rows} rows")
    return link.Features(
        handle=message.handle,
        first_position=message.first_position,
        num_rows=message.num_rows,
        payload=message.payload,
    )

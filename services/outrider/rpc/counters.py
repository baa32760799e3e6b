"""Raw counters of a link's end."""

from dataclasses import dataclass

__all__ = ["LinkCounters"]


@dataclass(slots=True, kw_only=True)
class LinkCounters:
    """Over all links of one transport or one server."""

    messages_sent: int = 0
    messages_received: int = 0
    dropped: int = 0
    """Received messages or events that were malformed, did not belong to the link, or found no room."""

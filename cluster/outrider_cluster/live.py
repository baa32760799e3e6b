"""Which settings may change while a deployment runs, and which take a restart."""

import dataclasses

from outrider.core.policy import GateSettings
from outrider_cluster.settings import Settings

__all__ = ["LIVE_FIELDS", "fixed_difference"]

LIVE_FIELDS: dict[str, frozenset[str]] = {
    "speculation": frozenset(field.name for field in dataclasses.fields(GateSettings)),
    "router": frozenset(
        {
            "max_running_requests",
            "max_running_requests_per_key",
            "max_running_tokens",
            "default_timeout_s",
            "max_timeout_s",
        }
    ),
}
"""Fields that the routers apply within one engine step, by section. All others were built in."""


def fixed_difference(before: Settings, after: Settings) -> str | None:
    """Name of the first field that differs and cannot change live; None when there is none."""
    for section in type(before).model_fields:
        old, new = getattr(before, section), getattr(after, section)
        if old == new:
            continue
        if section not in LIVE_FIELDS:
            return section
        for name in type(old).model_fields:
            if name not in LIVE_FIELDS[section] and getattr(old, name) != getattr(new, name):
                return f"{section}.{name}"
    return None

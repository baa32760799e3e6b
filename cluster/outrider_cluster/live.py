"""What a change of the settings takes while a deployment runs: nothing, another draft, or new replicas.

Live: the routers apply it within one engine step. Draft: the draft replicas drain, and start anew; the
targets decode plainly in between and are not touched. Rolling: Serve replaces replica by replica.
Never: it belongs to the cluster that the deployment runs in, or to what clients call it by.
"""

import dataclasses
from enum import Enum

from outrider.core.policy import GateSettings
from outrider_cluster.settings import Settings

__all__ = ["DRAFT_FIELDS", "LIVE_FIELDS", "Change", "change_between", "fixed_difference"]

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
    "security": frozenset({"api_keys_file"}),
}
"""Fields that the routers apply within one engine step, by section."""

DRAFT_FIELDS: dict[str, frozenset[str]] = {
    "draft": frozenset({"model", "dtype", "quantization", "max_model_len", "kv", "max_num_seqs", "threads", "cuda"})
}
"""Fields that only a draft replica is built from."""

_CLUSTER_SECTIONS = ("grpc", "http", "ray")


class Change(Enum):
    """What a difference of settings takes, the least first."""

    NONE = "none"
    LIVE = "live"
    DRAFT = "draft"
    ROLLING = "rolling"
    RESTART = "restart"


def change_between(before: Settings, after: Settings) -> tuple[Change, str]:
    """The most that any difference takes, and the first field that takes it ("" without a difference)."""
    found = [(_takes(before, after, field), field) for field in _differences(before, after)]
    order = list(Change)
    return max(found, key=lambda one: order.index(one[0]), default=(Change.NONE, ""))


def fixed_difference(before: Settings, after: Settings) -> str | None:
    """Name of the first field that differs and that a running target is built from; None when there is none."""
    change, field = change_between(before, after)
    return field if change in (Change.ROLLING, Change.RESTART) else None


def _takes(before: Settings, after: Settings, field: str) -> Change:
    section, _, name = field.partition(".")
    if name in LIVE_FIELDS.get(section, ()):
        return Change.LIVE
    if field == "draft.model" and _reads_features(before, after):
        return Change.ROLLING
    if name in DRAFT_FIELDS.get(section, ()):
        return Change.DRAFT
    if section in _CLUSTER_SECTIONS or (section == "model" and before.model.public_name != after.model.public_name):
        return Change.RESTART
    return Change.ROLLING


def _reads_features(*settings: Settings) -> bool:
    """Whether a draft of any of these reads what its targets store for this very head."""
    return any(one.active_draft is not None and one.active_draft.method == "eagle3" for one in settings)


def _differences(before: Settings, after: Settings) -> list[str]:
    """Fields that differ: a section's own ones where it has some on both sides, else the section."""
    found = []
    for section in type(before).model_fields:
        old, new = getattr(before, section), getattr(after, section)
        if old == new:
            continue
        names = getattr(type(old), "model_fields", None)
        if names is None or type(old) is not type(new):
            found.append(section)
        else:
            found += [f"{section}.{name}" for name in names if getattr(old, name) != getattr(new, name)]
    return found

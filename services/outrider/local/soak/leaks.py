"""What an idle stack still holds, in words."""

from outrider.core.dispatch import EngineStatus
from outrider.local.draft_handle import DraftLoad

__all__ = ["draft_leaks", "target_leaks"]


def target_leaks(status: EngineStatus) -> list[str]:
    """What the target has left; empty when it is idle and clean."""
    found = []
    if status.running or status.waiting:
        found.append(f"target: {status.running} sequences running and {status.waiting} waiting")
    if status.kv_usage:
        found.append(f"target: {status.kv_usage:.1%} of the KV blocks in use")
    if held := sum(link.open_sequences for link in status.draft_links):
        found.append(f"target: {held} sequences open on the draft")
    return found


def draft_leaks(load: DraftLoad | None) -> list[str]:
    """What the draft has left; empty when it is clean or there is none."""
    found = []
    if load is not None and load.sequences:
        found.append(f"draft: {load.sequences} sequences held")
    if load is not None and load.kv_usage:
        found.append(f"draft: {load.kv_usage:.1%} of the KV blocks in use")
    return found

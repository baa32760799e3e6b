"""How many replicas a demand asks for. Pure: bounds and delays belong to whoever applies it."""

import math

__all__ = ["follow", "replicas_for"]

_SHRINK_LEVEL = 0.85
"""Replicas go only where the rest would stay below this share of the wanted load: the load that made one
come must not make it go again."""


def replicas_for(demand: float, *, current: int) -> int:
    """Replicas for `demand`, the sum over replicas of what each one's work asks for; at least one.

    `current` replicas stay while the demand lies between the level that adds one and the level that
    removes one.
    """
    # Rounded first: 0.7 + 0.1 + 0.2 of one replica is one replica, not two.
    most = max(1, math.ceil(round(demand, 6)))
    if most >= current:
        return most
    return min(current, max(1, math.ceil(round(demand / _SHRINK_LEVEL, 6))))


def follow(leaders: int, *, per_replica: float) -> int:
    """Replicas that follow `leaders` of another kind, `per_replica` of them each; at least one."""
    return max(1, math.ceil(round(leaders / per_replica, 6)))

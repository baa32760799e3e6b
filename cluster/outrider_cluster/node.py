"""The machine that this process runs on, as Ray knows it."""

import ray

__all__ = ["own_address"]


def own_address() -> str:
    """This node's address in the Ray cluster."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address

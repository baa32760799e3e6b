"""Settings of the test process and everything that it starts."""

import os
from importlib.util import find_spec

import pytest

# Set before torch, Ray or DeepSpeed is imported; a value from outside wins.
_ENVIRONMENT = {
    # Threads that spin beside each other slow one another down by an order of magnitude.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # gRPC tells on stderr of every connection that a server closes in good order.
    "GRPC_VERBOSITY": "ERROR",
    # Loopback only: no model hub, no usage reports.
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray asks for a token by default and runs its workers at nice 15.
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def _gpu_count() -> int:
    if find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no GPU. Asks torch only if such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and _gpu_count() == 0:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))

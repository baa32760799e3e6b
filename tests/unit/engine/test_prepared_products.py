"""How many prepared products oneDNN keeps, by its own account, in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from outrider.engine.linear import can_pack

SCRIPT = """
import sys, torch
from outrider.engine.linear import PackedLinear
layer = PackedLinear(torch.randn(32, 16), None)
for label in ("first", "again"):
    print(label, flush=True)
    for rows in range(1, int(sys.argv[1]) + 1):
        layer(torch.randn(rows, 16))
"""
VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="this build of torch has no oneDNN"
)


def found_again(num_row_counts: int, **environment: str) -> set[str]:
    """What oneDNN says when each number of rows comes a second time."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(num_row_counts)],
        env=inherited | {"ONEDNN_VERBOSE": "profile_create"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    _, again = done.stdout.split("again")
    return {field for line in again.splitlines() for field in line.split(",") if field.startswith("create:")}


def test_the_row_counts_of_a_steady_load_are_kept() -> None:
    assert found_again(100) == {"create:cache_hit"}


def test_those_of_an_ever_other_load_are_not() -> None:
    assert found_again(200) == {"create:cache_miss"}


def test_what_the_environment_says_stays() -> None:
    assert found_again(200, **{VARIABLE: "1024"}) == {"create:cache_hit"}

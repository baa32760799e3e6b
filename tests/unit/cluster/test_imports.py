"""Processes without a model load no torch: it would cost each of them seconds and 200 MB."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["target_deployment", "router_deployment", "draft_deployment", "service", "cli"])
def test_deploying_and_routing_need_no_torch(module: str) -> None:
    script = f"import sys, outrider_cluster.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0

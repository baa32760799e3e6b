"""`infra/benchmarks/gpu_step.py` runs from end to end, on the CPU, with torch, transformers and numpy alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "benchmarks" / "gpu_step.py"

# A module that is None in sys.modules cannot be imported.
RUN_ALONE = """
import runpy, sys
for name in ("deepspeed", "fastapi", "google", "grpc", "opentelemetry", "pydantic", "ray", "typer"):
    sys.modules[name] = None
script, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.timeout(300)
def test_the_script_runs_with_a_tiny_model_on_the_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-c", RUN_ALONE, str(SCRIPT), "--device", "cpu", "--tiny", "--json", str(report)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert {(row["batch"], row["width"]) for row in result["rows"]} == {(b, w) for b in (1, 8, 32) for w in (1, 4, 8)}
    assert all(row["step_ms"] > 0 and row["share_of_bound"] > 0 for row in result["rows"])
    assert result["check"]["argmax_agreement"] == 1
    assert done.stdout.splitlines()[-4].split()[:2] == ["model", "B"]

"""What the README shows a stranger runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.served import Served

README = Path(__file__).parents[2] / "README.md"


def test_the_python_client_runs_as_printed(scripted_cluster: Served, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(script.splitlines()) <= 16
    path = tmp_path / "client.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path), scripted_cluster.address], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    assert text
    assert re.fullmatch(r"\d+ of \d+ drafted tokens accepted", last)

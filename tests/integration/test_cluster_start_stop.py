"""`outrider serve` interrupted while it starts: nothing stays behind."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.support.served import served

from outrider.core.generation import GenerationRequest
from outrider.core.speculation import SpeculationReason
from outrider.rpc.client import OutriderClient

SERVE = Path(__file__).parents[2] / "infra" / "serve"

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("moment", ["starting Ray", "deploying", "engine is starting"])
def test_ctrl_c_during_the_start_leaves_no_process(moment: str) -> None:
    command = [sys.executable, "-c", "from outrider_cluster.cli import main; main()", "serve"]
    process = subprocess.Popen(
        [*command, str(SERVE / "scripted.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(moment):
            break
    seen = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "stopped by SIGINT" in err
    assert "Traceback" not in err
    assert (out, process.returncode) == ("", 0)
    assert [child for child in seen if child.is_running()] == []
    # Processes that started after the signal share its session.
    assert [one for one in psutil.process_iter() if session_of(one.pid) == process.pid] == []


def session_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[3])


async def test_a_draft_that_never_comes_holds_nobody_up(tmp_path: Path) -> None:
    text = (SERVE / "scripted.yaml").read_text()
    config = tmp_path / "no-gpu.yaml"
    # The draft asks for a GPU, and the cluster that is started has none.
    config.write_text(text.replace("  num_cpus: 0.5", "  num_cpus: 0.5\n  num_gpus: 1") + "ray: {num_gpus: 0}\n")
    with served(config, tmp_path / "serve.log") as cluster:
        async with OutriderClient(cluster.address) as client:
            request = GenerationRequest(text="HELLO", max_tokens=20, seed=1)
            outcome = (await client.generate(request, timeout_s=30)).choices[0].end
    assert outcome.usage.completion_tokens == 20
    assert outcome.speculation.reason is SpeculationReason.DRAFT_UNAVAILABLE
    log = (tmp_path / "serve.log").read_text()
    assert "starting Ray" in log
    assert "INFO" not in log  # Ray's chatter
    assert "Traceback" not in log  # a thread of Serve that called after the end


def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("model: {name: m, max_model_len: 16}\ntarget: {kv: {num_blocks: 1}}\ndraught: {}\n")
    command = [sys.executable, "-c", "from outrider_cluster.cli import main; main()", "serve", str(config)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{config}:3: draught" in result.stderr

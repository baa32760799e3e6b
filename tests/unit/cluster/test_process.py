"""Signals, orphans and standard output, each tried on a process of its own."""

import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


WAITING = """
import signal
from outrider_cluster.stopping import StopRequested, StopSignals
with StopSignals() as signals:
    try:
        {inside}
        print("ready", flush=True)
        signal.pause()
    except StopRequested as stop:
        print(f"stopped by {{stop}}", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_an_exception(number: signal.Signals) -> None:
    process = start(WAITING.format(inside="pass"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate()
    assert (out, process.returncode) == (f"stopped by {number.name}\n", 0), err


def test_a_deferred_signal_waits_for_the_end_of_its_block() -> None:
    inside = """
        with signals.deferred():
            print("deferring", flush=True)
            input()
            print("block finished", flush=True)
    """
    process = start(WAITING.format(inside=inside.strip()))
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "deferring\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("go on\n")
    assert out == "block finished\nstopped by SIGINT\n", err


def test_handlers_that_a_deferred_block_installs_do_not_survive_it() -> None:
    inside = """
        with signals.deferred():
            signal.signal(signal.SIGTERM, lambda number, frame: print("foreign handler", flush=True))
    """
    process = start(WAITING.format(inside=inside.strip()))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert out == "stopped by SIGTERM\n", err


ORPHAN = """
import subprocess, sys
from outrider_cluster.reaper import no_process_left
grandchild = "import signal, time; {prelude}; print('up', flush=True); time.sleep(600)"
child = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE);"
    "p.stdout.readline(); print(p.pid, flush=True)"
)
with no_process_left():
    # The child ends at once and leaves its own child behind.
    done = subprocess.run([sys.executable, "-c", child, grandchild], stdout=subprocess.PIPE, check=True)
    print(int(done.stdout), flush=True)
    input()
"""


@pytest.mark.parametrize("prelude", ["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_an_orphan_is_ended_even_when_it_ignores_sigterm(prelude: str) -> None:
    process = start(ORPHAN.format(prelude=prelude))
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    _, err = process.communicate("go on\n")
    assert process.returncode == 0, err
    assert not psutil.pid_exists(pid)


def test_claimed_stdout_carries_the_commands_own_lines_only() -> None:
    process = start(
        "import os, subprocess\n"
        "from outrider_cluster.cli.terminal import claimed_stdout\n"
        "with claimed_stdout() as announce:\n"
        "    print('a library prints', flush=True)\n"
        "    subprocess.run(['echo', 'a child prints'], check=True)\n"
        "    announce('ready')\n"
        "print('after')\n"
    )
    out, err = process.communicate()
    assert out == "ready\nafter\n"
    assert err == "a library prints\na child prints\n"


SERVING = """
import contextlib, os, signal, sys
from types import SimpleNamespace

def update(settings):
    print("updated", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)

@contextlib.contextmanager
def running_service(settings, progress, signals=None):
    os.kill(os.getpid(), signal.SIGHUP)
    yield SimpleNamespace(ingress=SimpleNamespace(grpc_address="127.0.0.1:1", http_address=None), update=update)

sys.modules["outrider_cluster.service"] = SimpleNamespace(running_service=running_service)
from outrider_cluster.cli.serve import serve
serve(None)
"""


def test_a_hangup_while_the_engine_loads_waits_until_it_serves() -> None:
    process = start(SERVING)
    out, err = process.communicate(timeout=50)
    assert (out, process.returncode) == ("ready grpc=127.0.0.1:1\n", 0), err
    assert "updated" in err
    assert "stopped by SIGTERM" in err


LATE_CALL = """
from outrider_cluster.settings import default_settings, prepare_environment
prepare_environment(default_settings())
import ray
try:
    ray.put(1)
except Exception as error:
    print(type(error).__name__, ray.is_initialized())
"""


def test_a_call_without_a_cluster_starts_none() -> None:
    out, err = start(LATE_CALL).communicate()
    assert out.endswith(" False\n"), (out, err)

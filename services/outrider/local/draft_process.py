"""A draft in a child process: its forwards share no interpreter with the target's.

The child is a fresh interpreter, so scripts need no `if __name__ == "__main__"` and notebooks work.
It is told its configuration through a pipe, answers with its address, and ends when the pipe does:
a parent that is gone, however it went, takes its draft along.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from outrider.core.errors import EngineUnavailable, OutriderError
from outrider.core.threads import share_interpreter
from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.local.draft_handle import DraftLoad
from outrider.local.threads import run_in_thread

__all__ = ["ChildDraft", "main"]

_STOP_S = 10.0
_LOAD = "load"
"""The question that a child answers with its `DraftLoad`."""


class ChildDraft:
    """The parent's view of the process. Used on one event loop. Implements `LocalDraft`."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, address: str) -> None:
        self.address = address
        self._process = process
        self._pipe = pipe

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    @classmethod
    async def start(cls, engine_config: EngineConfig, config: DraftConfig, timeout_s: float) -> "ChildDraft":
        """Start the process and wait until it serves.

        Raises `EngineUnavailable` when it does not within `timeout_s`, or what it raised itself.
        """
        ours, theirs = Pipe()
        process = _spawned(theirs)
        try:
            ours.send((engine_config, config))
            if not await asyncio.to_thread(ours.poll, timeout_s):
                raise EngineUnavailable(f"the draft did not start within {timeout_s:g} s")
            answer = _received(ours)
            if isinstance(answer, OutriderError):
                raise answer
            return cls(process, ours, str(answer))
        except BaseException:
            # Its end of the pipe goes with it, and with that the wait of the thread above.
            process.kill()
            process.wait()
            ours.close()
            raise

    async def load(self) -> DraftLoad:
        """What it holds now. Raises `EngineUnavailable` when it has ended."""
        try:
            self._pipe.send(_LOAD)
        except OSError as error:
            raise EngineUnavailable("the draft has ended") from error
        answer = await asyncio.to_thread(_received, self._pipe)
        if not isinstance(answer, DraftLoad):
            raise EngineUnavailable(f"the draft answered {answer!r}")
        return answer

    async def stop(self) -> None:
        """End the process, by force if it does not end by itself."""
        self._pipe.close()
        await run_in_thread(lambda: _end(self._process))


def _spawned(pipe: Connection) -> subprocess.Popen[bytes]:
    """Start a child at the other end of `pipe`, which is closed here."""
    command = [sys.executable, "-m", "outrider.local.draft_process", str(pipe.fileno())]
    try:
        return subprocess.Popen(command, pass_fds=[pipe.fileno()])
    finally:
        pipe.close()


def _received(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise EngineUnavailable("the draft has ended") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> None:
    """Main of the child: the one argument is the number of the pipe's descriptor."""
    # Ctrl-C goes to the whole terminal; the parent ends its child in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    share_interpreter()
    pipe = Connection(int(arguments[0]))
    engine_config, config = pipe.recv()
    # Read by the OpenMP runtime when torch is loaded, which happens below.
    os.environ["OMP_NUM_THREADS"] = str(engine_config.threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with contextlib.suppress(BrokenPipeError):  # the parent has gone while the model was being loaded
        asyncio.run(_serve(pipe, engine_config, config))
    # Everything has been ended in order. gRPC's poller and torch leave threads behind that the interpreter
    # would unwind through C++ on its way out, which aborts the process now and then.
    os._exit(0)


async def _serve(pipe: Connection, engine_config: EngineConfig, config: DraftConfig) -> None:
    from outrider.local.draft_server import DraftServer

    try:
        server = await DraftServer.start(engine_config, config, progress=lambda text: None)
    except OutriderError as error:
        pipe.send(error)
        return
    try:
        pipe.send(server.address)
        while await asyncio.to_thread(_question, pipe) == _LOAD:
            pipe.send(await server.load())
    finally:
        await server.stop()


def _question(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


if __name__ == "__main__":
    main(sys.argv[1:])

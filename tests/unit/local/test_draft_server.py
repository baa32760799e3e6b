"""A local draft whose start is given up leaves no thread behind."""

import asyncio
import threading

import pytest

from outrider.draft.drafter import Drafter
from outrider.local.config import scripted_settings
from outrider.local.draft_server import DraftServer

LIMIT_S = 20.0


async def test_a_start_that_is_cancelled_in_the_warm_up_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    warming, go_on = threading.Event(), threading.Event()

    def warm_up(drafter: Drafter) -> None:
        threads.append(threading.current_thread())
        warming.set()
        go_on.wait(LIMIT_S)

    monkeypatch.setattr(Drafter, "warm_up", warm_up)
    settings = scripted_settings(draft_agreement=0.9, max_model_len=128)
    assert settings.draft is not None
    start = asyncio.create_task(DraftServer.start(settings.draft, settings.drafting, lambda text: None))
    assert await asyncio.to_thread(warming.wait, LIMIT_S)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    go_on.set()
    (thread,) = threads
    await asyncio.to_thread(thread.join, LIMIT_S)
    assert not thread.is_alive()

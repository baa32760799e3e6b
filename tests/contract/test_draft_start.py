"""A draft whose start fails leaves no thread behind."""

import threading
from pathlib import Path

import pytest

from outrider_cluster.draft_runtime import start_draft
from outrider_cluster.settings import load_settings

SCRIPTED = Path(__file__).parents[2] / "infra" / "serve" / "scripted.yaml"


async def test_a_draft_that_cannot_listen_leaves_no_thread() -> None:
    settings = load_settings(SCRIPTED)
    assert settings.active_draft is not None
    # An address for documentation: no machine has it.
    with pytest.raises(Exception, match=r"192\.0\.2\.1"):
        await start_draft(settings, settings.active_draft, incarnation=1, host="192.0.2.1")
    for thread in threading.enumerate():
        if thread.name == "outrider-draft":
            thread.join(20)
            assert not thread.is_alive()

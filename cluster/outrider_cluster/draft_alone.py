"""The draft model as an ordinary engine: how fast it decodes by itself, for comparison.

It runs on the same engine loop and data plane as a target, in an actor of its own, and drafts for
nobody.
"""

import asyncio
import logging
import os
from typing import Any

import ray

from outrider_cluster.assembly import draft_engine_config, draft_model_name
from outrider_cluster.data_plane import EngineIdentity
from outrider_cluster.memory import sized_draft
from outrider_cluster.node import own_address
from outrider_cluster.primary_rank import PrimaryRank
from outrider_cluster.settings import Environment, Settings

__all__ = ["DraftAlone", "start_draft_alone"]

_log = logging.getLogger(__name__)


class DraftAlone:
    """An async actor around rank 0 of a group of one, whose model is the draft."""

    def __init__(self, settings: Settings) -> None:
        """Starts nothing. Raises `ValueError` without a draft."""
        draft = settings.active_draft
        if draft is None:
            raise ValueError("draft: is not enabled")
        os.environ["OMP_NUM_THREADS"] = str(draft.threads)
        self._draft = draft
        self._with_draft = settings
        self._settings = settings.model_copy(
            update={
                "draft": None,
                "model": settings.model.model_copy(
                    update={"name": draft_model_name(settings, draft), "served_name": "draft"}
                ),
                "target": settings.target.model_copy(update={"tensor_parallel_size": 1}),
            }
        )
        self._rank: PrimaryRank | None = None

    async def start(self) -> str:
        """Load the model and serve; returns the data plane's address."""
        environment = Environment.read()
        engine_config = draft_engine_config(self._with_draft, self._draft, environment)
        engine_config = await asyncio.to_thread(
            sized_draft, engine_config, self._with_draft, self._draft, environment, _log.info
        )
        self._rank = PrimaryRank(
            self._settings,
            EngineIdentity(engine_id="draft-alone", epoch=1),
            self._settings.data_plane.host or own_address(),
            engine_config=engine_config,
        )
        return await self._rank.start()


def start_draft_alone(settings: Settings) -> tuple[Any, str]:
    """Start the actor in the running cluster; returns its handle, which keeps it alive, and its address."""
    actor_class: Any = ray.remote(DraftAlone)
    actor = actor_class.options(num_cpus=0).remote(settings)
    address: str = ray.get(actor.start.remote())
    return actor, address

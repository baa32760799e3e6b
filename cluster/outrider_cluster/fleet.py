"""What Ray and Serve know about nodes and deployments, for `outrider status`."""

import asyncio
import logging
from functools import partial
from typing import Any

import ray
from ray import serve

from outrider.core.fleet import DeploymentStatus, FleetStatus, NodeStatus
from outrider.local.threads import run_in_thread
from outrider.telemetry.recent_errors import RecentErrors

__all__ = ["FleetReader"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0


_Found = tuple[tuple[NodeStatus, ...], tuple[DeploymentStatus, ...]]


class FleetReader:
    """Asks both, one question at a time. Used on one event loop.

    Calls of Ray know no time limit. Asked again and again while they hang, they would use up the threads
    that tokenize, so a question has a thread of its own, and whoever asks meanwhile waits for its answer.
    """

    def __init__(self, application: str, errors: RecentErrors) -> None:
        """`errors`: of this process; part of every answer."""
        self._application = application
        self._errors = errors
        self._asked: asyncio.Task[_Found] | None = None

    async def read(self) -> FleetStatus:
        """Wait for a few seconds at most; without an answer the status says so and is empty."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(run_in_thread(partial(_read, self._application)), name="fleet")
            # An error that comes after its time limit has been reported as that.
            self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                nodes, deployments = await asyncio.shield(self._asked)
        except Exception as error:  # noqa: BLE001 - a status that fails with the control plane would be of no use
            _log.warning("the control plane does not answer: %s", error)
            self._errors.add("the control plane does not answer")
            nodes, deployments = (), ()
        return FleetStatus(nodes=nodes, deployments=deployments, recent_errors=self._errors.latest_first())


def _read(application: str) -> _Found:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    known = serve.status().applications.get(application)
    deployments = known.deployments if known is not None else {}
    return (
        tuple(sorted((_node(one) for one in nodes), key=lambda one: (not one.alive, one.address))),
        tuple(
            _deployment(name, one.status.value, one.message, one.replica_states) for name, one in deployments.items()
        ),
    )


def _node(node: dict[str, Any]) -> NodeStatus:
    return NodeStatus(
        address=node["NodeManagerAddress"],
        alive=node["Alive"],
        cpus=node["Resources"].get("CPU", 0.0),
        gpus=node["Resources"].get("GPU", 0.0),
    )


def _deployment(name: str, state: str, message: str, replicas: dict[Any, int]) -> DeploymentStatus:
    """`replicas`: by Serve's state, which is a string or an enum of strings."""
    counts = {str(getattr(one, "value", one)): count for one, count in replicas.items()}
    running = counts.pop("RUNNING", 0)
    # Serve says a whole traceback; its last line is what went wrong.
    words = [line for line in message.strip().splitlines() if line.strip()]
    return DeploymentStatus(
        name=name,
        state=state.lower(),
        running=running,
        other=sum(counts.values()),
        message=words[-1].strip() if words and state != "HEALTHY" else "",
    )

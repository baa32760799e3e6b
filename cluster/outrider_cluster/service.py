"""A whole deployment for the duration of a block: Ray, Serve, the application, and a served engine."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from outrider.core.errors import EngineUnavailable
from outrider_cluster.app import APPLICATION, ROUTER, TARGET
from outrider_cluster.codec import check_draft_vocabulary
from outrider_cluster.data_plane import ReplicaView
from outrider_cluster.deploying import Deployer
from outrider_cluster.key_file import KeyFile
from outrider_cluster.live import Change
from outrider_cluster.ray_group import reason_of
from outrider_cluster.ray_runtime import Ingress, running_serve
from outrider_cluster.settings import Environment, Settings
from outrider_cluster.stopping import StopRequested, StopSignals

__all__ = ["Service", "running_service"]

Progress = Callable[[str], None]

_DEPLOY_TIMEOUT_S = 120.0
_CHANGE_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 30.0
"""Longest that Serve may take beside what is asked of it."""
_ROUTER_TIMEOUT_S = 30.0
_FAILURES_BEFORE_GIVING_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A deployment that serves."""

    ingress: Ingress
    update: Callable[[Settings], Change]
    """Apply changed settings while it runs: see `Deployer.update`. Raises `CompatibilityError` as well, and
    `EngineUnavailable` when Serve does not answer."""


@contextlib.contextmanager
def running_service(settings: Settings, progress: Progress, signals: StopSignals | None = None) -> Iterator[Service]:
    """Deploy, wait until an engine serves, and take everything down at the end.

    The draft is not waited for. Raises `ConfigError`, `CompatibilityError` (a draft with another
    vocabulary, by its first differing token) or `EngineUnavailable` when the engine keeps failing.
    """
    _check(settings, progress)
    progress("starting Ray" if settings.ray.address is None else f"joining Ray at {settings.ray.address}")
    with running_serve(settings, signals) as ingress:
        for address in ingress.metrics_addresses:
            progress(f"metrics at http://{address}/metrics")
        progress("deploying")
        deployer = Deployer(settings)
        try:
            try:
                deployer.deploy(_DEPLOY_TIMEOUT_S)
                _wait_for_engine(progress)
            except RayError as error:
                raise EngineUnavailable(reason_of(error)) from error

            def update(settings: Settings) -> Change:
                _check(settings, progress)
                try:
                    return deployer.update(settings)
                except RayError as error:
                    raise EngineUnavailable(reason_of(error)) from error

            yield Service(ingress=ingress, update=update)
        except SystemError as error:
            # What Ray makes of a stop that arrives while it waits for an object.
            if isinstance(error.__cause__, StopRequested):
                raise error.__cause__ from None
            raise
        finally:
            if settings.ray.address is not None:
                # The cluster outlives us, so the application has to go by itself.
                serve.delete(APPLICATION)


def _check(settings: Settings, progress: Progress) -> None:
    """What would fail in a replica, where it takes a minute to tell: the draft's vocabulary, the file of keys."""
    check_draft_vocabulary(settings, Environment.read(), progress)
    # The routers of a cluster that was joined read files of their own nodes.
    if settings.ray.address is None and settings.security.api_keys_file is not None:
        KeyFile(Path(settings.security.api_keys_file)).read()


def _wait_for_engine(progress: Progress) -> None:
    with _calls_to(TARGET) as target:
        view: ReplicaView | None = None
        while True:
            known = view
            view = target.wait_for_change.remote(known, _CHANGE_TIMEOUT_S).result(
                timeout_s=_CHANGE_TIMEOUT_S + _ANSWER_TIMEOUT_S
            )
            if view.ready:
                break
            if view != known:
                progress(view.problem)
            if view.failures_in_a_row >= _FAILURES_BEFORE_GIVING_UP:
                raise EngineUnavailable(view.problem)
    with _calls_to(ROUTER) as router:
        router.wait_for_engine.remote(_ROUTER_TIMEOUT_S).result(timeout_s=_ROUTER_TIMEOUT_S + _ANSWER_TIMEOUT_S)


@contextlib.contextmanager
def _calls_to(deployment: str) -> Iterator[DeploymentHandle[object]]:
    """A handle whose thread does not go on telling the controller how much it is used, beyond Ray's own end."""
    handle: DeploymentHandle[object] = serve.get_deployment_handle(deployment, APPLICATION)
    try:
        yield handle
    finally:
        handle.shutdown()  # type: ignore[no-untyped-call]

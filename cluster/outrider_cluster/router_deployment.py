"""The public ingress as a Serve deployment: gRPC in, requests dispatched over the engines."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2
from opentelemetry.sdk.trace import TracerProvider
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.types import ASGIApp

from outrider.core.caller import Authenticate
from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.core.generation import Caller
from outrider.core.ports import Endpoint
from outrider.router.api_keys import counted
from outrider.router.engine_pool import EnginePool
from outrider.router.openai.door import DoorOptions, OpenAIDoor
from outrider.router.run import FailoverSettings
from outrider.router.service import RouterService, ServiceSettings
from outrider.router.timing import LoopTime
from outrider.rpc.dispatch_client import GrpcEngineSession
from outrider.rpc.generation_handlers import GenerationHandlers
from outrider.rpc.generation_servicer import PUBLIC_SERVICES
from outrider.rpc.health import Health
from outrider.telemetry.recent_errors import RecentErrors
from outrider.telemetry.request_metrics import RequestMetrics
from outrider.v1 import generation_pb2 as pb
from outrider_cluster.assembly import gate_settings, router_limits, tls_files
from outrider_cluster.codec import Codec, target_codec
from outrider_cluster.deployment_service import DeploymentService
from outrider_cluster.directory import ServeDirectory
from outrider_cluster.fleet import FleetReader
from outrider_cluster.http_ingress import AsgiAnswer, closed
from outrider_cluster.key_file import KeyFollower
from outrider_cluster.observability import Role, configure_logs, provider_for, request_tracer
from outrider_cluster.ray_metrics import RayMetricSink
from outrider_cluster.settings import Environment, Settings, settings_of

__all__ = ["RouterIngress"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MIB = 1 << 20
_CONNECT_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 2.0
_HEALTH_INTERVAL_S = 0.25


class RouterIngress:
    """A Serve replica. Method names are those of the gRPC services that it implements."""

    def __init__(self, targets: DeploymentHandle[Any]) -> None:
        """Starts nothing; `reconfigure` follows before the replica counts as running."""
        # A process that asked Ray for no GPU sees all of them; the tokenizer needs none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._targets = targets
        self._context = serve.get_replica_context()
        self._environment = Environment.read()
        self._settings: Settings | None = None
        self._router: RouterService | None = None
        self._pool: EnginePool | None = None
        self._handlers: GenerationHandlers | None = None
        self._http: ASGIApp = closed
        self._keys = KeyFollower()
        self._health = Health(PUBLIC_SERVICES)
        self._watching: asyncio.Task[None] | None = None
        self._sink = RayMetricSink()
        self._errors = RecentErrors(LoopTime())
        self._provider: TracerProvider | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """The first settings start the router; later ones apply within one engine step.

        Another model takes another router: what ran here fails as retryable.
        """
        settings = settings_of(user_config, origin="user_config")
        configure_logs(settings.telemetry, Role.ROUTER, self._context.replica_id.unique_id)
        await self._keys.apply(settings.security)
        before, self._settings = self._settings, settings
        if self._router is not None and before is not None and before.model == settings.model:
            try:
                self._router.update_settings(gate_settings(settings), router_limits(settings))
            except ConfigError:
                self._settings = before
                raise
            return
        if self._router is not None:
            await self._router.close()
        await self._start(settings)

    async def _start(self, settings: Settings) -> None:
        codec = await asyncio.to_thread(target_codec, settings, self._environment, _log.info)
        directory = ServeDirectory(self._targets, timeout_s=settings.router.directory_timeout_s, clock=LoopTime())
        metrics = RequestMetrics(
            self._sink, model=settings.model.public_name, router=self._context.replica_id.unique_id, errors=self._errors
        )
        if self._provider is None:
            self._provider = provider_for(settings.telemetry, Role.ROUTER, self._context.replica_id.unique_id)
        self._pool = EnginePool(
            directory=directory,
            connect=self._connect,
            model=settings.model.public_name,
            time=LoopTime(),
            gate=gate_settings(settings),
            refresh_interval_s=settings.router.directory_interval_s,
            metrics=metrics,
            pending=lambda: [f"{one.replica_id}: {one.problem}" for one in directory.views if not one.ready],
        )
        self._router = RouterService(
            codec=codec,
            pool=self._pool,
            limits=router_limits(settings),
            time=LoopTime(),
            broadcast_abort=self._abort_elsewhere,
            limits_of=self._keys.ring.limits_of,
            metrics=metrics,
            spans=request_tracer(self._provider, settings.telemetry),
            settings=ServiceSettings(failover=FailoverSettings(rebuild_wait_s=settings.router.failover_wait_s)),
        )
        await self._router.start()
        service = DeploymentService(self._router, lambda: directory.views)
        authenticate = counted(self._keys.ring.authenticate, metrics)
        fleet = FleetReader(self._context.app_name, self._errors)
        self._handlers = GenerationHandlers(service, authenticate, fleet=fleet.read)
        self._http = _door(settings, service, codec, self._pool, authenticate) if settings.http.enabled else closed
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.create_task(self._watch(self._pool, metrics), name="router-health")

    async def __call__(self, request: Request) -> AsgiAnswer:
        """Every HTTP request of Serve's proxy."""
        return AsgiAnswer(self._http)

    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        """`GenerationService/Generate`."""
        return await _started(self._handlers).generate(request, grpc_context)

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        """`GenerationService/StreamGenerate`. Serve closes the iterator of a client that leaves."""
        async with aclosing(_started(self._handlers).stream_generate(request, grpc_context)) as responses:
            async for response in responses:
                yield response
        if grpc_context.details():
            # Serve's proxy learns status and trailers along with a message only; raising would drop
            # the trailers. Clients pass over a message without an event.
            yield pb.StreamGenerateResponse()

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:
        """`GenerationService/Abort`."""
        return await _started(self._handlers).abort(request, grpc_context)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetModelInfoResponse:
        """`ModelService/GetModelInfo`."""
        return await _started(self._handlers).get_model_info(request, grpc_context)

    async def GetSpeculationStatus(
        self, request: pb.GetSpeculationStatusRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetSpeculationStatusResponse:
        """`ModelService/GetSpeculationStatus`."""
        return await _started(self._handlers).get_speculation_status(request, grpc_context)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        """`grpc.health.v1.Health/Check`: serving means that at least one engine takes requests."""
        return await self._health.check(request, grpc_context)

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthListResponse:
        """`grpc.health.v1.Health/List`."""
        return await self._health.list_services(request, grpc_context)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """`grpc.health.v1.Health/Watch`."""
        async with aclosing(self._health.watch(request, grpc_context)) as responses:
            async for response in responses:
                yield response
        # As above: the only way out of the loop is a status.
        yield health_pb2.HealthCheckResponse()

    async def abort_here(self, request_id: str, caller: Caller) -> bool:
        """From another router: end a request if it runs here."""
        return _started(self._router).abort_local(request_id, caller)

    async def wait_for_engine(self, timeout_s: float) -> None:
        """Return once an engine takes requests here. Raises `EngineUnavailable` after `timeout_s`."""
        pool = _started(self._pool)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await pool.refresh()
                async for state in self._health.states():
                    if state == health_pb2.HealthCheckResponse.SERVING:
                        return
        raise EngineUnavailable("; ".join(one.problem for one in pool.statuses()) or "no engine is known")

    async def __del__(self) -> None:
        self._keys.close()
        if self._watching is not None:
            self._watching.cancel()
        if self._router is not None:
            await self._router.close()
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)

    async def _watch(self, pool: EnginePool, metrics: RequestMetrics) -> None:
        while True:
            metrics.flush()
            self._health.set_serving(any(one.ready for one in pool.statuses()))
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _connect(self, endpoint: Endpoint) -> GrpcEngineSession:
        return await GrpcEngineSession.connect(
            endpoint.address,
            self._context.replica_id.unique_id,
            _CONNECT_TIMEOUT_S,
            auth_token=self._environment.auth_token,
            tls=None if self._settings is None else tls_files(self._settings),
        )

    async def _abort_elsewhere(self, request_id: str, caller: Caller) -> bool:
        routers: DeploymentHandle[Any] = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        try:
            answers = await routers.broadcast("abort_here", request_id, caller).results_async(
                timeout_s=_ABORT_TIMEOUT_S, return_exceptions=True
            )
        except TimeoutError:
            raise EngineUnavailable("not every router has answered the abort") from None
        return any(answer is True for answer in answers)


def _door(
    settings: Settings, service: DeploymentService, codec: Codec, pool: EnginePool, authenticate: Authenticate
) -> ASGIApp:
    return OpenAIDoor(
        service,
        tokens=codec,
        authenticate=authenticate,
        ready=lambda: any(one.ready for one in pool.statuses()),
        options=DoorOptions(max_body_bytes=round(settings.http.max_body_mib * _MIB)),
        started_at_s=time.time(),
    ).app


def _started(part: T | None) -> T:
    if part is None:
        raise EngineUnavailable("the router has not been configured yet")
    return part

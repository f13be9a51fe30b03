"""The router's process: HTTP in front, gRPC to the workers behind."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from functools import partial
from typing import Any

from ray.exceptions import RayError

from baton.core.errors import BatonError, ConfigError, InternalError
from baton.core.logs import configure_logging
from baton.core.roles import POOLS
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.explain.timelines import Order, TimelineStore
from baton.process.background import BackgroundTasks
from baton.process.descriptors import raise_descriptor_limit
from baton.process.garbage import spare_pauses
from baton.process.listening import listen
from baton.rpc.wire import worker_pb2
from cluster.autoscaling.pool_control import RayPoolControl
from cluster.config.config import BatonConfig
from cluster.control_plane import ControlPlane
from cluster.dispatch.router import Router
from cluster.gateway.api_keys import ApiKeys
from cluster.gateway.connections import choose_max_connections
from cluster.gateway.gateway import create_app
from cluster.gateway.http_protocol import Edge
from cluster.gateway.http_server import EdgeServer
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.origins import OriginPolicy
from cluster.gateway.tls import create_tls_context, load_certificate
from cluster.latency.store import FitStore
from cluster.registry.worker_client import WorkerClient
from cluster.registry.workers import WorkerInfo, WorkerRegistry, WorkerState
from cluster.requests.generation import ModelCard
from cluster.telemetry.cluster_metrics import ClusterFigures, PoolFigures
from cluster.telemetry.metrics import MetricsPage
from cluster.telemetry.tracing import NoTracer, RequestTracer, create_tracer

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 2.0
_SHUTDOWN_GRACE_S = 3
"""Time limit of running requests when the router stops; later they end with an error."""
_GOODBYE_S = 2
"""Time for these errors to reach their clients."""


class RouterHost:
    """Hosts gateway and router; implements :class:`cluster.gateway.gateway.AdminBackend` for them.

    Args:
        port: port to listen on; 0 means any free one.
        controller: handle of the controller actor, which owns the pools.
        secret: the cluster's secret.
    """

    def __init__(self, config: dict[str, Any], port: int, controller: Any, secret: bytes) -> None:
        self._config = BatonConfig.from_dict(config)
        configure_logging(self._config.log, "router")
        self._port = port
        self._controller = controller
        credentials = self._config.security.credentials(secret)
        self._registry = WorkerRegistry(partial(WorkerClient, credentials=credentials))
        self._plane = ControlPlane(
            self._config,
            self._registry,
            RayPoolControl(controller),
            hash_key=credentials.secret.block_hash_key,
            store=FitStore(),
        )
        self._metrics = self._plane.metrics
        self._api_keys = ApiKeys()
        self._tls: ssl.SSLContext | None = None
        self._max_connections = 0
        self._scaling: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()
        self._metrics_page = MetricsPage(self._metrics, self._poll_cluster)
        self._timelines = TimelineStore(self._config.router.timelines_kept)
        self._tracer: RequestTracer = NoTracer()
        self._router: Router | None = None
        self._tokenizer: Tokenizer | None = None
        self._server: EdgeServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._started_s = time.monotonic()
        self._stopped = asyncio.Event()
        self._is_stopping = False

    async def start(self) -> tuple[str, int]:
        """Binds the port and loads the tokenizer; HTTP begins with the first worker. Returns (endpoint, port).

        Raises:
            ConfigError: the port is taken, the model has no tokenizer, an API key or the certificate cannot be used,
                OpenTelemetry is wanted but not installed, or too few files may be opened for router.max_connections.
        """
        self._tracer = create_tracer(self._config.telemetry)
        self._api_keys = ApiKeys(self._config.router.api_keys)
        if self._config.router.tls is not None:
            self._tls = create_tls_context(self._config.router.tls)
        self._max_connections = choose_max_connections(self._config.router.max_connections, raise_descriptor_limit())
        self._socket = listen(self._config.router.host, self._port)
        source = await asyncio.to_thread(resolve_model, self._config.model)
        try:
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, source.path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model: {source.path} has no usable tokenizer ({str(error).splitlines()[0]}). "
                "A model folder must contain its tokenizer files and the weights."
            ) from error
        port = int(self._socket.getsockname()[1])
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{_url_host(self._config.router.host)}:{port}", port

    async def add_worker(self, info: dict[str, Any]) -> None:
        """Adds a ready worker. The first one describes the model and opens the endpoint."""
        worker = self._registry.add(WorkerInfo.from_dict(info))
        self._plane.prefixes.add(worker)
        self._plane.watch.add(worker.info.worker_id, worker.client)
        await worker.sync_clock()
        await self._plane.step_costs.add(worker)
        if self._serving is None:
            self._serve(worker.info)

    async def drain_worker(self, worker_id: str, timeout_s: float) -> None:
        """Drains a worker. Returns when no request uses it, or after ``timeout_s``."""
        worker = self._registry.drain(worker_id)
        if worker is None:
            return
        try:
            await asyncio.wait_for(worker.idle.wait(), timeout_s)
        except TimeoutError:
            return
        finally:
            self._plane.prefixes.remove(worker_id)  # the worker's server waits for open streams when it stops

    async def remove_worker(self, worker_id: str) -> None:
        self._plane.prefixes.remove(worker_id)
        self._plane.watch.remove(worker_id)
        await self._registry.remove(worker_id)
        self._plane.step_costs.remove(worker_id)

    def reload(self, config: dict[str, Any]) -> None:
        """Takes over API keys and SLO classes, and the present content of the certificate's files.

        Raises:
            ConfigError: they cannot be used, and nothing has changed.
        """
        new = BatonConfig.from_dict(config)
        api_keys, tls = ApiKeys(new.router.api_keys), self._config.router.tls
        if tls is not None and self._tls is not None:
            create_tls_context(tls)  # a failure must leave the context in use as it is
            load_certificate(self._tls, tls)
        self._api_keys.become(api_keys)
        self._plane.change_slo_classes(new.slo)

    async def wait(self) -> None:
        """Returns after :meth:`stop`. Raises the HTTP server's error if the server ends before."""
        await self._stopped.wait()
        if self._serving is not None and self._serving.done() and not self._is_stopping:
            self._serving.result()
            raise InternalError("the router's HTTP server stopped unexpectedly")

    async def stop(self) -> None:
        self._is_stopping = True
        if self._scaling is not None:
            self._scaling.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
            await self._plane.step_costs.save()
        await self._plane.prefixes.close()
        self._plane.admission.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            _, running = await asyncio.wait({self._serving}, timeout=_SHUTDOWN_GRACE_S)
            if running:
                # Their calls fail and no further attempt is admitted, so the clients get an error.
                await asyncio.gather(*(worker.client.close() for worker in self._registry.workers))
                await asyncio.wait({self._serving}, timeout=_GOODBYE_S + 1)
        await self._tracer.stop()
        self._stopped.set()

    def _serve(self, info: WorkerInfo) -> None:
        if self._tokenizer is None or self._socket is None:
            raise RuntimeError("a worker was added to a router that has not been started")
        model = ModelCard(
            name=info.model_name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            created_unix_s=int(time.time()),
            eos_token_ids=frozenset(info.eos_token_ids),
        )
        self._router = self._plane.create_router(model, self._timelines)
        router = self._config.router
        limits = GatewayLimits(max_body_bytes=router.max_body_bytes, request_timeout_s=router.request_timeout_s)
        app = create_app(
            self._router,
            self._tokenizer,
            self,
            limits,
            self._metrics.http,
            self._tracer.submit,
            slo_classes=self._plane.slo_classes,
            api_keys=self._api_keys,
            open_paths=router.open_paths,
            origins=OriginPolicy(router.host, router.allowed_hosts),
            is_kept=self._timelines.keeps,
        )
        self._server = EdgeServer(
            app,
            self._socket,
            Edge(self._metrics.http.observe_refusal),
            max_connections=self._max_connections,
            keep_alive_s=router.keep_alive_s,
            tls=self._tls,
            shutdown_timeout_s=_SHUTDOWN_GRACE_S + _GOODBYE_S,
        )
        self._serving = asyncio.create_task(self._server.run_until_stopped())
        self._serving.add_done_callback(lambda _: self._stopped.set())
        self._feeding = self._background.spawn(self._plane.step_costs.run())
        self._watching = self._background.spawn(self._plane.watch.run())
        spare_pauses()
        self._scaling = self._background.spawn(self._plane.autoscaler.run())

    async def status(self) -> dict[str, Any]:
        pools: dict[str, Any] = await self._controller.pool_status.remote()
        stats = await self._poll_workers()
        for pool in POOLS:
            for entry in pools[pool]["workers"]:
                self._add_live_figures(entry, stats.get((pool, entry["id"])))
        router = self._router
        return {
            "model": router.model.name if router else None,
            "max_model_len": router.model.max_model_len if router else None,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "requests": {
                "in_flight": router.num_in_flight if router else 0,
                "finished": router.num_finished if router else 0,
                "cancelled": router.num_cancelled if router else 0,
                "rejected": router.num_rejected if router else 0,
                "failed": router.num_failed if router else 0,
            },
            "slo": self._metrics.slo.status(),
            "admission": self._plane.admission.status(),
            "predictions": self._metrics.prediction_errors.summary(),
            "pools": pools,
        }

    async def scale(self, targets: dict[str, int | None]) -> dict[str, Any]:
        return {"pools": await self._controller.scale.remote(targets)}

    async def change_role(self, source: str, destination: str) -> dict[str, Any]:
        return {"pools": await self._controller.change_role.remote(source, destination)}

    async def plan(self) -> dict[str, Any]:
        return await self._plane.autoscaler.look()

    async def advise(self) -> dict[str, Any]:
        return await self._plane.autoscaler.advise()

    def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any]:
        return self._timelines.find(request_id, owner)

    def requests(self, order: Order, limit: int) -> list[dict[str, Any]]:
        return self._timelines.listing(order, limit)

    async def metrics(self) -> bytes:
        return await self._metrics_page.get()

    def _add_live_figures(self, entry: dict[str, Any], stats: worker_pb2.WorkerStats | None) -> None:
        worker = self._registry.get(entry["id"])
        entry["in_flight"] = worker.in_flight if worker else 0
        if worker is not None and worker.suspicion and entry["state"] == WorkerState.READY:
            entry.update(state=str(WorkerState.SUSPECTED), reason=worker.suspicion)
        if stats is not None:
            entry.update(
                running=stats.num_running,
                waiting=stats.num_waiting,
                transfers=stats.num_transfers,
                kv_blocks_total=stats.kv_blocks_total,
                kv_blocks_used=stats.kv_blocks_used,
                kv_blocks_cached=stats.kv_blocks_cached,
                kv_blocks_leaked=stats.num_leaked_blocks,
                preemptions=stats.num_preemptions,
            )

    async def _poll_cluster(self) -> ClusterFigures:
        workers, answer = await asyncio.gather(self._poll_workers(), self._poll_controller())
        pools, num_router_restarts = answer or ({}, None)
        return ClusterFigures(workers, pools, num_router_restarts, dict(self._registry.num_suspicions))

    async def _poll_controller(self) -> tuple[dict[str, PoolFigures], int] | None:
        """The controller's figures; ``None`` if it does not answer, since requests do not depend on it."""
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                figures: tuple[dict[str, PoolFigures], int] = await self._controller.figures.remote()
                return figures
        except (RayError, TimeoutError) as error:
            logger.warning("the controller did not answer a scrape: %s", error)
            return None

    async def _poll_workers(self) -> dict[tuple[str, str], worker_pb2.WorkerStats | None]:
        """The statistics of every worker; ``None`` for a worker that does not answer."""
        workers = self._registry.workers
        results = await asyncio.gather(
            *(worker.client.stats(_STATS_TIMEOUT_S) for worker in workers), return_exceptions=True
        )
        found: dict[tuple[str, str], worker_pb2.WorkerStats | None] = {}
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, BatonError):
                raise result
            found[worker.info.pool, worker.info.worker_id] = None if isinstance(result, BatonError) else result
        return found


def _load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer and a cached property, which would delay the first request by a tenth of a second."""
    tokenizer = Tokenizer.load(path)
    _ = tokenizer.max_token_chars
    return tokenizer


def _url_host(host: str) -> str:
    """A host that a client on this machine can put into a URL."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host

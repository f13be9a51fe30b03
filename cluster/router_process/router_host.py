"""Hosts a router: HTTP in front, gRPC to the workers behind."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
import time
from functools import partial
from typing import Any

import ray

from baton.core.errors import ConfigError, InternalError
from baton.core.logs import configure_logging
from baton.core.slo import BATCH, SloClass
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.explain.timelines import TimelineStore
from baton.grammar.compiler import GrammarCompiler
from baton.process.background import BackgroundTasks
from baton.process.descriptors import raise_descriptor_limit
from baton.process.garbage import spare_pauses
from baton.process.listening import listen
from cluster.config.config import BatonConfig
from cluster.control_plane import ControlPlane
from cluster.gateway.api_keys import ApiKeys, Share
from cluster.gateway.connections import choose_max_connections
from cluster.gateway.formats.dialect import Dialect
from cluster.gateway.gateway import create_app
from cluster.gateway.http_protocol import Edge
from cluster.gateway.http_server import EdgeServer
from cluster.gateway.jobs.line_requests import job_endpoint
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.origins import OriginPolicy
from cluster.gateway.page.live_feed import LiveFeed
from cluster.gateway.tls import create_tls_context, load_certificate
from cluster.jobs.jobs import Jobs
from cluster.jobs.pace import Pace
from cluster.latency.store import FitStore
from cluster.losses.controller_link import ControllerLink
from cluster.losses.open_call import OpenCall
from cluster.losses.orphan_watch import end_without_controller
from cluster.losses.ray_part_watch import RayPartWatch, gcs_part
from cluster.losses.raylet_watch import raylet_ends
from cluster.registry.worker_client import WorkerClient
from cluster.registry.workers import WorkerInfo, WorkerRegistry
from cluster.requests.generation import ModelCard
from cluster.router_process.router_admin import RouterAdmin
from cluster.router_process.router_peers import LEADER, Question, RouterPeers
from cluster.telemetry.tracing import NoTracer, RequestTracer, create_tracer

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 2.0
_SHUTDOWN_GRACE_S = 3
"""Time limit of running requests when the router stops; later they end with an error."""
_GOODBYE_S = 2
"""Time for these errors to reach their clients."""


class RouterHost:
    """Hosts gateway and router.

    Args:
        port: port to listen on; 0 means any free one.
        controller: handle of the controller actor, which owns the pools.
        secret: the cluster's secret.
        index: number of this router, from 0, if there are several (``router.replicas``). They share the port.

    Attributes:
        admin: what the router tells operators.
    """

    def __init__(self, config: dict[str, Any], port: int, controller: Any, secret: bytes, index: int = 0) -> None:
        self._config = BatonConfig.from_dict(config)
        has_others = self._config.router.replicas > 1
        name = f"router-{index}" if has_others else "router"
        configure_logging(self._config.log, name)
        self._index = index
        self._port = port
        self._endpoint = ""
        self._secret = secret
        self._controller = ControllerLink(controller)
        credentials = self._config.security.credentials(secret)
        self._registry = WorkerRegistry(partial(WorkerClient, credentials=credentials))
        self._plane = ControlPlane(
            self._config,
            self._registry,
            self._controller,
            hash_key=credentials.secret.block_hash_key,
            store=FitStore() if index == LEADER else None,
            router_id=f"{name}-{secrets.token_hex(4)}" if has_others else "",
            other_traffic=lambda: self.admin.other_traffic(),
        )
        self._metrics = self._plane.metrics
        self._api_keys = ApiKeys()
        self._tls: ssl.SSLContext | None = None
        self._max_connections = 0
        self._scaling: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._watching_gcs: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()
        self._timelines = TimelineStore(self._config.router.timelines_kept)
        self._peers = RouterPeers(index)
        self.admin = RouterAdmin(index, self._controller, self._plane, self._timelines, self._peers)
        self._live = LiveFeed(self.admin)
        self._tracer: RequestTracer = NoTracer()
        self._tokenizer: Tokenizer | None = None
        self._grammars: GrammarCompiler | None = None
        self._server: EdgeServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._stopped = asyncio.Event()
        self._waiting = OpenCall()
        self._is_stopping = False
        self._pace = Pace(self._config.jobs.max_in_flight, self._is_urgent)
        self._jobs: Jobs | None = None
        self._running_jobs: asyncio.Task[None] | None = None
        end_without_controller(self._config.ray)

    async def start(self) -> tuple[str, int]:
        """Binds the port and loads the tokenizer; HTTP begins with the first worker. Returns (endpoint, port).

        Raises:
            ConfigError: the port is taken, the model has no tokenizer, an API key or the certificate cannot be used,
                OpenTelemetry or PostgreSQL is wanted without its packages, or too few files may be opened for
                router.max_connections.
        """
        self._tracer = create_tracer(self._config.telemetry)
        self._api_keys = self._own_share(self._config)
        if self._config.router.tls is not None:
            self._tls = create_tls_context(self._config.router.tls)
        self._max_connections = choose_max_connections(self._config.router.max_connections, raise_descriptor_limit())
        self._socket = listen(self._config.router.host, self._port, is_shared=self._config.router.replicas > 1)
        source = await asyncio.to_thread(resolve_model, self._config.model)
        self._tokenizer = await asyncio.to_thread(
            _load_tokenizer, source.path, self._config.router.special_tokens_in_content == "text"
        )
        self._port = int(self._socket.getsockname()[1])
        scheme = "http" if self._tls is None else "https"
        self._endpoint = f"{scheme}://{_url_host(self._config.router.host)}:{self._port}"
        if self._config.jobs.enabled:
            holder = f"{socket.gethostname()}:{self._port}/{self._index}"  # the next process of this router has it, too
            self._jobs = self.admin.jobs = Jobs(self._config.jobs, self._pace, holder)
        self._background.spawn(self._end_with_raylet())
        return self._endpoint, self._port

    async def describe(self) -> dict[str, Any]:
        """What the next controller must know. The endpoint is empty before :meth:`start`."""
        return {
            "config": self._config.to_dict(),
            "secret": self._secret,
            "endpoint": self._endpoint,
            "port": self._port,
            "index": self._index,
        }

    async def beat(self) -> int:
        """The process id. The answer shows that the event loop runs."""
        return os.getpid()

    async def meet(self, routers: dict[int, Any]) -> None:
        """Knows exactly these routers from now on, by index."""
        self._peers.meet(routers)

    async def answer(self, question: Question, *arguments: Any) -> Any:
        """Answers another router."""
        return await self.admin.answer(question, *arguments)

    async def follow(self, controller: Any, workers: list[dict[str, Any]]) -> None:
        """Belongs to another controller from now on, and has exactly these workers."""
        self._controller.follow(controller)
        infos = {info.worker_id: info for info in map(WorkerInfo.from_dict, workers)}
        for worker in self._registry.workers:
            # A drain that the last controller began is undone: the worker is removed and added again.
            if worker.info != infos.get(worker.info.worker_id) or worker.draining:
                await self.remove_worker(worker.info.worker_id)
        for info in workers:
            await self.add_worker(info)

    async def add_worker(self, info: dict[str, Any]) -> None:
        """Adds a ready worker, if it is new. The first one describes the model and opens the endpoint."""
        if self._registry.get(str(info["worker_id"])) is not None:
            return
        worker = self._registry.add(WorkerInfo.from_dict(info))
        self._plane.prefixes.add(worker)
        if self._plane.others is not None:
            self._plane.others.add(worker)
        self._plane.watch.add(worker.info.worker_id, worker.client)
        await worker.sync_clock()
        await self._plane.step_costs.add(worker)
        if self._grammars is None and self._tokenizer is not None:
            self._grammars = GrammarCompiler(self._tokenizer.to_json, worker.info.vocab_size, ())
            await asyncio.to_thread(self._grammars.load)  # later, it would delay streams
        if self._serving is None:
            self._serve(worker.info)

    async def drain_worker(self, worker_id: str, timeout_s: float) -> None:
        """Drains a worker. Returns when no request uses it, or after ``timeout_s``."""
        worker = self._registry.drain(worker_id)
        if worker is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await worker.idle.wait()
        except TimeoutError:
            return
        finally:
            self._end_streams(worker_id)  # the worker's server waits for them when it stops

    async def remove_worker(self, worker_id: str) -> None:
        self._end_streams(worker_id)
        self._plane.watch.remove(worker_id)
        await self._registry.remove(worker_id)
        self._plane.step_costs.remove(worker_id)

    def _end_streams(self, worker_id: str) -> None:
        self._plane.prefixes.remove(worker_id)
        if self._plane.others is not None:
            self._plane.others.remove(worker_id)

    def reload(self, config: dict[str, Any]) -> None:
        """Takes over API keys and SLO classes, and the present content of the certificate's files.

        Other keys may differ if only workers use them.

        Raises:
            ConfigError: they cannot be used, and nothing has changed.
        """
        new = BatonConfig.from_dict(config)
        api_keys, tls = self._own_share(new), self._config.router.tls
        if tls is not None and self._tls is not None:
            create_tls_context(tls)  # a failure must leave the context in use as it is
            load_certificate(self._tls, tls)
        self._config = new  # for the next controller
        self._api_keys.become(api_keys)
        self._plane.change_slo_classes(new.slo)

    async def check_model(self, config: dict[str, Any]) -> None:
        """Checks whether requests that this router has checked and tokenized can be served by the model of ``config``.

        Raises:
            ConfigError: clients know the model by another name, or its tokenizer or chat template differs.
        """
        new = BatonConfig.from_dict(config)
        source = await asyncio.to_thread(resolve_model, new.model)
        name, shown = next(iter(new.served_model_names), source.name), self.admin.router
        if shown is not None and name != shown.model.name:
            raise ConfigError(
                f"model: clients know the model as {shown.model.name}, but would have to call it {name}. Set "
                f"served_model_name: {shown.model.name} when the cluster starts, or start another cluster."
            )
        tokenizer = await asyncio.to_thread(Tokenizer.load, source.path)
        if self._tokenizer is not None and not self._tokenizer.equals(tokenizer):
            raise ConfigError(
                f"model: {new.model} has another tokenizer or chat template than {self._config.model}, and a running "
                "router keeps its own. Start another cluster with the new model, and move the clients there."
            )

    async def wait(self) -> None:
        """Returns after :meth:`stop` or when there is another call. Raises the HTTP server's error if that ends."""
        await self._waiting.run(self._wait())

    async def _wait(self) -> None:
        await self._stopped.wait()
        if self._serving is not None and self._serving.done() and not self._is_stopping:
            self._serving.result()
            raise InternalError("the router's HTTP server stopped unexpectedly")

    async def _end_with_raylet(self) -> None:
        """Ends open streams with an error when Ray is about to end this process."""
        await raylet_ends()
        logger.error("Ray has ended on this node, and this router ends with it")
        await self._end(grace_s=0.0)

    async def stop(self) -> None:
        """Refuses new requests, and ends running ones with an error after some seconds."""
        await self._end(_SHUTDOWN_GRACE_S)

    async def _end(self, grace_s: float) -> None:
        self._is_stopping = True
        for task in (self._scaling, self._watching, self._watching_gcs, self._running_jobs):
            if task is not None:
                task.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
            await self._plane.step_costs.save()
        await self._plane.prefixes.close()
        if self._plane.others is not None:
            await self._plane.others.close()
        self._plane.admission.close()
        self._live.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            _, running = await asyncio.wait({self._serving}, timeout=grace_s)
            if running:
                # Their calls fail and no further attempt is admitted, so the clients get an error.
                await asyncio.gather(*(worker.client.close() for worker in self._registry.workers))
                await asyncio.wait({self._serving}, timeout=_GOODBYE_S + 1)
        if self._running_jobs is not None:  # else its lines would count as lost with this router
            await asyncio.wait({self._running_jobs}, timeout=_GOODBYE_S)
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
            aliases=self._config.served_model_names[1:],
        )
        generator = self.admin.router = self._plane.create_router(model, self._timelines, [self._pace])
        router = self._config.router
        limits = GatewayLimits(
            max_body_bytes=router.max_body_bytes,
            max_inflight=router.max_inflight,
            request_timeout_s=router.request_timeout_s,
            ignores_unknown=router.unknown_parameters == "ignore",
        )
        app = create_app(
            generator,
            self._tokenizer,
            self.admin,
            limits,
            self._metrics.http,
            self._tracer.submit,
            slo_classes=self._plane.slo_classes,
            api_keys=self._api_keys,
            open_paths=router.open_paths,
            origins=OriginPolicy(router.host, router.allowed_hosts, router.cors_origins),
            cors_origins=router.cors_origins,
            is_kept=self._timelines.keeps,
            dialect=Dialect(self._tokenizer, router.tool_parser, router.reasoning_parser),
            grammars=self._grammars,
            specials_are_text=router.special_tokens_in_content == "text",
            jobs=self._jobs,
            has_page=router.page,
            live=self._live,
        )
        if self._jobs is not None:
            inside = job_endpoint(app, self._api_keys, generator, limits)
            self._running_jobs = self._background.spawn(self._jobs.run(inside))
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
        if ray.is_initialized():
            watch = RayPartWatch(gcs_part(ray.get_runtime_context().gcs_address), logger.error)
            self._watching_gcs = self._background.spawn(watch.run())
        spare_pauses()
        if self._index == LEADER:
            self._scaling = self._background.spawn(self._plane.autoscaler.run())

    def _is_urgent(self, slo: SloClass) -> bool:
        """Whether requests of the class come before lines of jobs."""
        return slo.priority > self._plane.slo_classes.choose(BATCH.name, None).priority

    def _own_share(self, config: BatonConfig) -> ApiKeys:
        """The API keys, with this router's share of their limits."""
        return ApiKeys(config.router.api_keys, Share(self._index, config.router.replicas))


def _load_tokenizer(path: str, specials_are_text: bool) -> Tokenizer:
    """Loads the tokenizer and cached properties, which would delay the first request by a tenth of a second."""
    tokenizer = Tokenizer.load(path)
    _ = tokenizer.max_token_chars
    if specials_are_text:
        _ = tokenizer.special_tokens_as_text
    return tokenizer


def _url_host(host: str) -> str:
    """A host that a client on this machine can put into a URL."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host

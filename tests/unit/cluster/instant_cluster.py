"""A gateway, a router and workers in one process without sockets, so that thousands of requests take seconds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from fastapi import FastAPI

from baton.core.errors import TransferError, WorkerLostError
from baton.core.roles import DECODE, POOLS
from baton.explain.timelines import TimelineStore
from baton.rpc.wire import worker_pb2
from cluster.config.router_config import RouterConfig
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.latency.latency_model import LatencyModel
from cluster.registry.worker_client import WorkerClient
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import ModelCard
from cluster.routing.dispatcher import Dispatcher
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_contracts import RouteChooser
from cluster.routing.routing_profile import build_profile
from cluster.telemetry.cluster_metrics import ClusterFigures
from cluster.telemetry.metrics import MetricsPage, RouterMetrics
from tests.credentials import CREDENTIALS, connect
from tests.routers import admission_off, make_router
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin
from tests.worker_infos import make_info

TOKENIZER = byte_level_tokenizer()
CONTEXT_LENGTH = 256


class InstantClient(WorkerClient):
    """A worker that answers at once, and sometimes fails."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", CREDENTIALS)
        self._calls = itertools.count(1)

    async def prefill(
        self, request: worker_pb2.PrefillRequest, timeout_s: float, booking: worker_pb2.Booking | None = None
    ) -> AsyncGenerator[worker_pb2.PrefillEvent]:
        call = next(self._calls)
        if call % 29 == 0:
            raise WorkerLostError("gone")
        done = request.sequence.params.max_tokens == 1
        yield worker_pb2.PrefillEvent(
            first_token=worker_pb2.TokenBatch(token_ids=[40], finish_reason="length" if done else "")
        )
        if request.HasField("handoff"):
            failed = worker_pb2.HandoffResult(error_code=f"made-up-{call}", error_message="broken")
            good = worker_pb2.HandoffResult(num_bytes=100, num_parts=1, num_tokens=4, seconds=0.01)
            yield worker_pb2.PrefillEvent(handoff=failed if call % 31 == 0 else good)

    async def generate(
        self, request: worker_pb2.GenerateRequest, timeout_s: float, booking: worker_pb2.Booking | None = None
    ) -> AsyncGenerator[worker_pb2.TokenBatch]:
        call = next(self._calls)
        first, last = len(request.sequence.output_token_ids), request.sequence.params.max_tokens - 1
        for position in range(first, last + 1):
            if call % 37 == 0 and position > first:
                raise TransferError("broken")
            yield worker_pb2.TokenBatch(token_ids=[40], finish_reason="length" if position == last else "")

    async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
        return worker_pb2.WorkerStats(num_running=1)

    async def sync_clock(self) -> None:
        self._clock_offset_s = 0.0
        self._sync_due_s = float("inf")


@dataclass
class InstantCluster:
    """Two workers of each pool. ``/metrics`` is real; the other operator endpoints are fake."""

    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    registry: WorkerRegistry = field(default_factory=lambda: WorkerRegistry(connect))
    chooser: RouteChooser | None = None

    async def start(self, max_inflight: int = 16) -> FastAPI:
        for pool in POOLS:
            for number in (1, 2):
                worker = self.registry.add(make_info(f"{pool}-{number}", pool))
                await worker.client.close()
                worker.client = InstantClient()
                await worker.sync_clock()
        card = ModelCard(MODEL, CONTEXT_LENGTH, TOKENIZER.vocab_size, 0, frozenset({TOKENIZER.eos_token_id or 0}))
        config = RouterConfig(max_inflight=max_inflight, worker_wait_s=0.5)
        predictions = RequestPredictions(LatencyModel(), self.metrics.prediction_errors)
        # Without local prefill, because with these instant workers a hand-off would never pay.
        chooser = self.chooser or build_profile(RoutingConfig(local_prefill="never"), predictions.forecaster)
        dispatcher = Dispatcher(self.registry, predictions, chooser)
        admission = admission_off(dispatcher, self.registry, self.metrics, config.worker_wait_s)
        router = make_router(card, self.registry, self.metrics, predictions, admission, config, TimelineStore(50))
        for worker in self.registry.pool(DECODE):
            worker.info = make_info(worker.info.worker_id, DECODE, max_model_len=CONTEXT_LENGTH)
        admin = FakeAdmin()
        admin.metrics = MetricsPage(self.metrics, self._ask).get  # type: ignore[method-assign]
        return create_app(router, TOKENIZER, admin, GatewayLimits(), self.metrics.http)

    async def stop(self) -> None:
        for worker in self.registry.workers:
            await self.registry.remove(worker.info.worker_id)

    async def _ask(self) -> ClusterFigures:
        workers = self.registry.workers
        return ClusterFigures({(w.info.pool, w.info.worker_id): await w.client.stats() for w in workers})


async def call_app(
    app: FastAPI, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> int:
    """Sends one request directly to the application; returns the status."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise RuntimeError("nothing comes behind the body")

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "server": ("gateway", 80), "client": ("127.0.0.1", 1), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)  # type: ignore[arg-type]
    return int(str(sent[0]["status"]))

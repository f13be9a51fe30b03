"""Workers without a model: real gRPC servers whose behaviour a test scripts, and a router that uses them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from baton.core.errors import BatonError, WorkerLostError
from baton.core.request import SamplingParams
from baton.core.roles import DECODE, PREFILL
from baton.core.timeline import Event, Timeline
from baton.explain.timelines import TimelineStore
from baton.rpc.channel import PeerServer, abort_with
from baton.rpc.conversions import pack_events
from baton.rpc.credentials import PeerCredentials
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from cluster.config.router_config import RouterConfig
from cluster.latency.latency_model import LatencyModel
from cluster.registry.liveness_config import LivenessConfig
from cluster.registry.progress_watch import ProgressWatch
from cluster.registry.workers import WorkerInfo, WorkerRegistry
from cluster.requests.generation import GenerationRequest, ModelCard, TokenChunk
from cluster.requests.request_observers import RequestObserver
from cluster.routing.dispatcher import Dispatcher
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_profile import build_profile
from cluster.telemetry.metrics import RouterMetrics
from tests.credentials import CREDENTIALS, connect
from tests.routers import admission_off, make_router
from tests.waiting import TIMEOUT_S
from tests.worker_infos import make_info

ENDED = WorkerLostError("this worker's engine failed")
CACHED_TOKENS = 3
BYTES_MOVED = 4096

PrefillScript = Callable[["FakeWorker", worker_pb2.PrefillRequest], AsyncIterator[worker_pb2.PrefillEvent]]
DecodeScript = Callable[["FakeWorker", worker_pb2.GenerateRequest], AsyncIterator[worker_pb2.TokenBatch]]


def token_at(position: int) -> int:
    """The token of every fake worker at an output position, so that losses and duplicates are noticed."""
    return 100 + position


def expected_tokens(count: int) -> list[int]:
    return [token_at(position) for position in range(count)]


# Scripted behaviours of a worker. Each call consumes one script; without scripts, the worker behaves normally.


def batch(request: worker_pb2.GenerateRequest | worker_pb2.PrefillRequest, position: int) -> worker_pb2.TokenBatch:
    last = position == request.sequence.params.max_tokens - 1
    return worker_pb2.TokenBatch(token_ids=[token_at(position)], finish_reason="length" if last else "")


async def good_prefill(
    worker: FakeWorker, request: worker_pb2.PrefillRequest
) -> AsyncIterator[worker_pb2.PrefillEvent]:
    yield await worker.first_token(request)
    if request.HasField("handoff"):
        yield worker.handoff_done()


async def good_decode(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.TokenBatch]:
    queued_s = worker.now()
    for position in range(len(request.sequence.output_token_ids), request.sequence.params.max_tokens):
        message = batch(request, position)
        if queued_s:
            message.events.extend(
                pack_events({Event.DECODE_QUEUED: queued_s, Event.DECODE_STARTED: await worker.later()})
            )
            queued_s = 0.0
        yield message


def failing(error: BatonError) -> Callable[..., AsyncIterator[object]]:
    """A script that fails at once."""

    async def script(worker: FakeWorker, request: object) -> AsyncIterator[object]:
        raise error
        yield

    return script


async def hang(worker: FakeWorker, request: object) -> AsyncIterator[object]:
    await asyncio.Event().wait()
    yield


def hang_and_signal(begun: asyncio.Event) -> Callable[..., AsyncIterator[object]]:
    async def script(worker: FakeWorker, request: object) -> AsyncIterator[object]:
        begun.set()
        await asyncio.Event().wait()
        yield

    return script


async def end_at_once(worker: FakeWorker, request: object) -> AsyncIterator[object]:
    for nothing in ():
        yield nothing


async def die(worker: FakeWorker, request: object) -> AsyncIterator[object]:
    await worker.die()
    yield


def prefill_then(
    *after: worker_pb2.PrefillEvent | BatonError | Callable[[FakeWorker], object],
) -> PrefillScript:
    """A script that sends the first token, then messages, an error, or awaits a function's result."""

    async def script(worker: FakeWorker, request: worker_pb2.PrefillRequest) -> AsyncIterator[worker_pb2.PrefillEvent]:
        yield await worker.first_token(request)
        for step in after:
            if isinstance(step, worker_pb2.PrefillEvent):
                yield step
            elif isinstance(step, BatonError):
                raise step
            else:
                await step(worker)  # type: ignore[misc]

    return script


def handoff_failed(error: BatonError) -> worker_pb2.PrefillEvent:
    result = worker_pb2.HandoffResult(error_code=error.code, error_message=error.message)
    return worker_pb2.PrefillEvent(handoff=result)


def decode_some(count: int, then: BatonError | Callable[[FakeWorker], object]) -> DecodeScript:
    """A script that sends ``count`` tokens, then fails, or awaits a function's result and ends without a finish."""

    async def script(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.TokenBatch]:
        start = len(request.sequence.output_token_ids)
        for position in range(start, start + count):
            yield batch(request, position)
        if isinstance(then, BatonError):
            raise then
        await then(worker)  # type: ignore[misc]

    return script


async def endless(worker: FakeWorker) -> None:
    await asyncio.Event().wait()


async def death(worker: FakeWorker) -> None:
    await worker.die()


async def engine_end(worker: FakeWorker) -> None:
    """The worker's process goes on, but fails every call from now on."""
    worker.has_ended = True
    raise ENDED


class FakeWorker(worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer, worker_pb2_grpc.WorkerServicer):
    """One worker of either pool, with its own clock.

    Attributes:
        pause_s: time between two events, so that their order over connections is certain.
        ping_error_s: by how much the answers to pings are ahead of its clock.
    """

    def __init__(
        self, worker_id: str, pool: str, clock_shift_s: float = 0.0, credentials: PeerCredentials = CREDENTIALS
    ) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.clock_shift_s = clock_shift_s
        self.pause_s = 0.02
        self.ping_error_s = 0.0
        self.scripts: list[Callable[..., AsyncIterator[object]]] = []
        self.requests: list[worker_pb2.PrefillRequest | worker_pb2.GenerateRequest] = []
        self.abandoned: list[str] = []
        self.num_open = 0
        self.num_cancelled = 0
        self.num_pings = self.num_probes = self.num_steps = 0
        self.has_ended = False
        """Set, its process answers that its engine has ended."""
        self.answers = asyncio.Event()
        """Cleared, pings and probes have no answer."""
        self.answers.set()
        self.address = ""
        self._server = PeerServer(credentials)
        self._dead: asyncio.Task[None] | None = None

    @property
    def call_ids(self) -> list[str]:
        return [request.sequence.request_id for request in self.requests]

    async def start(self) -> WorkerInfo:
        worker_pb2_grpc.add_PrefillServicer_to_server(self, self._server.grpc)
        worker_pb2_grpc.add_DecodeServicer_to_server(self, self._server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server.grpc)
        self.address = self._server.bind("127.0.0.1")
        await self._server.start()
        return make_info(self.worker_id, self.pool, self.address)

    async def die(self) -> None:
        """Drops every connection. Does not return to a caller within a call."""
        if self._dead is None:
            self._dead = asyncio.create_task(self._server.stop(None))
        await asyncio.shield(self._dead)

    def now(self) -> float:
        return time.monotonic() + self.clock_shift_s

    async def later(self) -> float:
        """The time on this worker's clock after a pause."""
        await asyncio.sleep(self.pause_s)
        return self.now()

    async def first_token(self, request: worker_pb2.PrefillRequest) -> worker_pb2.PrefillEvent:
        await asyncio.sleep(self.pause_s)
        events = {
            Event.PREFILL_QUEUED: self.now(),
            Event.PREFILL_STARTED: await self.later(),
            Event.FIRST_TOKEN_SAMPLED: await self.later(),
        }
        await asyncio.sleep(self.pause_s)
        message = batch(request, 0)
        message.num_cached_tokens = CACHED_TOKENS
        return worker_pb2.PrefillEvent(first_token=message, events=pack_events(events))

    def handoff_done(self) -> worker_pb2.PrefillEvent:
        result = worker_pb2.HandoffResult(num_bytes=BYTES_MOVED, num_parts=1, num_tokens=4, seconds=0.1)
        events = {Event.TRANSFER_STARTED: self.now(), Event.KV_COMMITTED: self.now()}
        return worker_pb2.PrefillEvent(handoff=result, events=pack_events(events))

    async def Prefill(self, request, context):
        async for message in self._play(request, context, good_prefill):
            yield message

    async def Generate(self, request, context):
        async for message in self._play(request, context, good_decode):
            yield message

    async def Abandon(self, request, context):
        self.abandoned.append(request.transfer_id)
        return worker_pb2.AbandonReply()

    async def Ping(self, request, context):
        self.num_pings += 1
        await self.answers.wait()
        if self.has_ended:
            await abort_with(context, ENDED)
        return worker_pb2.PingReply(monotonic_s=self.now() + self.ping_error_s, num_steps=self.num_steps)

    async def Probe(self, request, context):
        self.num_probes += 1
        await self.answers.wait()
        self.num_steps += 1
        return worker_pb2.ProbeReply()

    async def GetStats(self, request, context):
        return worker_pb2.WorkerStats(worker_id=self.worker_id, role=self.pool, kv_blocks_total=7)

    async def _play(self, request, context, otherwise):
        self.requests.append(request)
        self.num_open += 1
        script = self.scripts.pop(0) if self.scripts else otherwise
        try:
            if self.has_ended:
                raise ENDED
            async for message in script(self, request):
                yield message
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit if cancelled while sending a message
            self.num_cancelled += 1
            raise
        except BatonError as error:
            await abort_with(context, error)
        finally:
            self.num_open -= 1


@dataclass
class FakeCluster:
    """Fake workers and the router under test. Use it as an async context.

    Leaving the context fails if there was an unhandled exception.
    """

    config: RouterConfig = field(default_factory=lambda: RouterConfig(worker_wait_s=5.0))
    registry: WorkerRegistry = field(default_factory=lambda: WorkerRegistry(connect))
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    observers: Sequence[RequestObserver] = ()
    """Additional observers."""
    timelines: TimelineStore = field(default_factory=lambda: TimelineStore(100))
    routing: RoutingConfig = field(default_factory=lambda: RoutingConfig(local_prefill="never"))
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    lost_errors: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = ProgressWatch(LivenessConfig(), self.registry.judged)
        card = ModelCard("fake", 4096, 100_000, 0)
        self.predictions = RequestPredictions(LatencyModel(), self.metrics.prediction_errors)
        chooser = build_profile(self.routing, self.predictions.forecaster, self.metrics.routing.observe_scorer)
        dispatcher = Dispatcher(self.registry, self.predictions, chooser, metrics=self.metrics.routing)
        admission = admission_off(dispatcher, self.registry, self.metrics, self.config.worker_wait_s)
        self.router = make_router(
            card,
            self.registry,
            self.metrics,
            self.predictions,
            admission,
            self.config,
            self.timelines,
            self.observers,
            self.watch.check,
        )

    async def add(self, worker_id: str, clock_shift_s: float = 0.0, layout: str = "same") -> FakeWorker:
        pool = PREFILL if worker_id.startswith("p") else DECODE
        worker = FakeWorker(worker_id, pool, clock_shift_s)
        self.workers[worker_id] = worker
        added = self.registry.add(replace(await worker.start(), kv_fingerprint=layout))
        await added.sync_clock()
        self.watch.add(worker_id, added.client)
        return worker

    async def add_all(self, worker_ids: Iterable[str]) -> list[FakeWorker]:
        return [await self.add(worker_id) for worker_id in worker_ids]

    async def __aenter__(self) -> FakeCluster:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.lost_errors.append(context))
        gc.freeze()  # collections then look only at the test's objects, which saves seconds
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for worker in self.registry.workers:
                await self.registry.remove(worker.info.worker_id)
            for worker in self.workers.values():
                await worker.die()
            gc.collect()
        finally:
            gc.unfreeze()
        await asyncio.sleep(0)
        asyncio.get_running_loop().set_exception_handler(None)
        assert self.lost_errors == []

    def request(self, request_id: str = "r", max_tokens: int = 6, prompt: tuple[int, ...] = (5, 6, 7, 8)):
        timeline = Timeline(request_id)
        timeline.record(Event.RECEIVED)
        timeline.record(Event.TOKENIZED)
        return GenerationRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), timeline)

    async def run(self, request: GenerationRequest | None = None) -> list[int]:
        """All tokens of one request."""
        return [token for chunk in await self.chunks(request) for token in chunk.token_ids]

    async def chunks(self, request: GenerationRequest | None = None) -> list[TokenChunk]:
        async with asyncio.timeout(TIMEOUT_S), aclosing(self.stream(request)) as chunks:
            return [chunk async for chunk in chunks]

    def stream(self, request: GenerationRequest | None = None) -> AsyncGenerator[TokenChunk]:
        return self.router.generate(request or self.request())

    def in_flight(self, worker_id: str) -> int:
        worker = self.registry.get(worker_id)
        return worker.in_flight if worker else 0

    @property
    def is_idle(self) -> bool:
        """Whether the router, its table of workers and the workers have no work."""
        return (
            self.router.num_in_flight == 0
            and all(worker.in_flight == 0 and worker.idle.is_set() for worker in self.registry.workers)
            and all(worker.num_open == 0 for worker in self.workers.values())
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def fresh(**router: object) -> FakeCluster:
    """A cluster with another configuration of the router."""
    return FakeCluster(RouterConfig.model_validate({"worker_wait_s": 5.0, **router}))

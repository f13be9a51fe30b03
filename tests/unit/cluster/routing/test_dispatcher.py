"""The dispatcher: its inputs, its bookings, and their release however a request ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import pytest
from prometheus_client import CollectorRegistry

from baton.core.errors import NoWorkerError
from baton.core.queue_priority import QueuePriority
from baton.core.request import SamplingParams
from baton.core.roles import DECODE, PREFILL
from baton.core.slo import BATCH, INTERACTIVE
from baton.core.timeline import Event, Timeline
from baton.rpc.wire import worker_pb2
from cluster.latency.calibration import PredictionErrors
from cluster.latency.latency_model import LatencyModel
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import GenerationRequest
from cluster.requests.request_record import RequestRecord
from cluster.routing.dispatcher import Dispatcher, RoutingMetrics
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_contracts import Preference, RouteDecision, RoutingRequest, WorkerSnapshot
from cluster.routing.routing_profile import build_profile
from tests.credentials import connect
from tests.fake_clock import FakeClock
from tests.worker_infos import make_info

PROMPT = tuple(range(100))


class Chooser:
    """Returns a scripted decision, and records its inputs."""

    def __init__(self, decision: RouteDecision | None) -> None:
        self.decision = decision
        self.shown: list[tuple[dict[str, WorkerSnapshot], RoutingRequest]] = []

    def choose(
        self,
        prefill: Sequence[WorkerSnapshot],
        decode: Sequence[WorkerSnapshot],
        request: RoutingRequest,
        preferred: Preference | None = None,
    ) -> RouteDecision | None:
        self.shown.append(({worker.worker_id: worker for worker in (*prefill, *decode)}, request))
        return self.decision


class Index:
    """A prefix index with scripted answers."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self.expected: list[tuple[str, float]] = []
        self.forgotten: list[tuple[Sequence[int], str]] = []

    def cached_tokens(self, worker_ids: Iterable[str], prompt: Sequence[int], salt: str = "") -> Mapping[str, int]:
        return {worker_id: self.tokens.get(worker_id, 0) for worker_id in worker_ids}

    def expect(self, worker_id: str, prompt: Sequence[int], until_s: float, salt: str = "") -> None:
        self.expected.append((worker_id, until_s))

    def forget_prompt(self, prompt: Sequence[int], salt: str) -> None:
        self.forgotten.append((prompt, salt))


PAIR = RouteDecision("p1", "d1", 30, 500.0, 20.0, record={"made": "up"})
ALONE = RouteDecision(None, "d1", 10, 500.0, 20.0)


class World:
    def __init__(self, decision: RouteDecision | None = PAIR, index: Index | None = None) -> None:
        self.clock = FakeClock(50.0)
        self.registry = WorkerRegistry(connect, clock=self.clock)
        for worker_id, pool in (("p1", PREFILL), ("p2", PREFILL), ("d1", DECODE)):
            self.registry.add(make_info(worker_id, pool, kv_blocks=100, max_num_seqs=8))
        self.predictions = RequestPredictions(LatencyModel(self.clock), PredictionErrors(), self.clock)
        self.chooser = Chooser(decision)
        self.index = index
        self.metrics_registry = CollectorRegistry()
        self.dispatcher = Dispatcher(
            self.registry,
            self.predictions,
            self.chooser,
            index,
            self.clock,
            RoutingMetrics(self.metrics_registry),
        )

    def record(self, request_id: str = "r", max_tokens: int = 40, **changes: Any) -> RequestRecord:
        timeline = Timeline(request_id, clock=self.clock)
        timeline.record(Event.RECEIVED)
        request = GenerationRequest(request_id, PROMPT, SamplingParams(max_tokens=max_tokens), timeline, **changes)
        return RequestRecord(request, 100.0, self.clock)

    @property
    def in_flight(self) -> dict[str, int]:
        return {worker.info.worker_id: worker.in_flight for worker in self.registry.workers}

    @property
    def is_idle(self) -> bool:
        ledger = self.predictions.ledger
        return not (any(self.in_flight.values()) or ledger._prompts or ledger._decoding)


@pytest.fixture
async def world() -> World:
    return World()


async def test_a_forecast_books_nothing(world: World) -> None:
    assert world.dispatcher.forecast(world.record()) is PAIR
    assert world.is_idle
    assert world.metrics_registry.get_sample_value("baton_routing_decision_seconds_count") == 1


async def test_a_booking_counts_at_once_until_it_is_released(world: World) -> None:
    record = world.record(slo=INTERACTIVE)
    with world.dispatcher.book(record, PAIR) as placement:
        assert [worker.info.worker_id for worker in placement.workers] == ["p1", "d1"]
        assert world.in_flight == {"p1": 1, "p2": 0, "d1": 1}
        ledger = world.predictions.ledger
        assert ledger.queue("p1", 51.0).tokens == 70
        assert ledger.batch("d1") == (1, 100)
        assert ledger.tpot_target_s("d1") == INTERACTIVE.tpot_s
        world.predictions.tokens(record, 1)
        assert not ledger.computes_prompts("p1")
        world.predictions.tokens(record, 3)
        assert ledger.batch("d1") == (1, 104)
        assert record.timeline.routing == {"made": "up"}
    assert world.is_idle
    placement.release()
    world.predictions.tokens(record, 1)
    assert world.is_idle
    assert world.metrics_registry.get_sample_value("baton_routes_total", {"kind": "pair"}) == 1


async def test_local_prefill_is_booked_on_the_decode_worker(world: World) -> None:
    with world.dispatcher.book(world.record(), ALONE):
        assert world.in_flight == {"p1": 0, "p2": 0, "d1": 1}
        ledger = world.predictions.ledger
        assert ledger.backlog_tokens("d1") == 90
        assert ledger.batch("d1") == (1, 100)
    assert world.is_idle
    assert world.metrics_registry.get_sample_value("baton_routes_total", {"kind": "local"}) == 1


async def test_a_single_token_takes_nothing_of_its_decode_worker(world: World) -> None:
    record = world.record(max_tokens=1)
    with world.dispatcher.book(record, PAIR):
        assert world.in_flight == {"p1": 1, "p2": 0, "d1": 0}
        assert world.predictions.ledger.batch("d1") == (0, 0)
        world.predictions.tokens(record, 1)
    assert world.is_idle
    with world.dispatcher.book(world.record(max_tokens=1), ALONE):
        assert world.in_flight == {"p1": 0, "p2": 0, "d1": 1}
        assert world.predictions.ledger.batch("d1") == (1, 100)
    assert world.is_idle


async def test_a_prefill_worker_that_is_kept_stays_busy_after_the_release(world: World) -> None:
    with world.dispatcher.book(world.record(), PAIR) as placement:
        done = placement.keep_prefill()
        with pytest.raises(RuntimeError):
            placement.keep_prefill()
    assert world.in_flight == {"p1": 1, "p2": 0, "d1": 0}
    done()
    assert world.is_idle


async def test_a_failure_inside_a_booking_releases_it(world: World) -> None:
    with pytest.raises(ValueError, match="inside"), world.dispatcher.book(world.record(), PAIR):
        raise ValueError("inside")
    assert world.is_idle


async def test_a_worker_removed_in_between_is_not_booked(world: World) -> None:
    decision = world.dispatcher.forecast(world.record())
    assert decision is not None
    await world.registry.remove("d1")
    with pytest.raises(NoWorkerError, match="d1"):
        world.dispatcher.book(world.record(), decision)
    assert world.is_idle


async def test_two_bookings_of_one_request_are_independent(world: World) -> None:
    record = world.record()
    first, second = world.dispatcher.book(record, PAIR), world.dispatcher.book(record, ALONE)
    first.release()
    assert world.predictions.ledger.batch("d1") == (1, 100)
    second.release()
    assert world.is_idle


async def test_policies_receive_snapshots_and_the_request(world: World) -> None:
    world.registry.drain("p2")
    world.predictions.habits.cached_tokens.observe(24)
    with world.dispatcher.book(world.record("other", slo=INTERACTIVE), PAIR):
        world.clock.now_s = 52.0
        record = world.record(slo=INTERACTIVE)
        world.clock.now_s = 52.5
        record.failed_on.add("p2")
        world.dispatcher.forecast(record)
    snapshots, request = world.chooser.shown[-1]
    assert request == RoutingRequest(
        "r",
        100,
        frozenset({"p2"}),
        INTERACTIVE,
        40,
        500.0,
        QueuePriority(2, 52.0 + INTERACTIVE.ttft_s, INTERACTIVE.ttft_s),
        output_tokens=40.0,
    )
    p1, p2, d1 = (snapshots[name] for name in ("p1", "p2", "d1"))
    assert (p1.accepting, p2.accepting) == (True, False)
    assert (p1.in_flight, p1.assigned, p1.last_assigned_s) == (1, 1, 50.0)
    assert (p1.queue.tokens, p1.queue.elapsed_ms, p1.backlog_tokens, p1.cached_tokens) == (70, 2500.0, 70, 24)
    assert (d1.batch, d1.context_tokens, d1.kv_tokens, d1.max_num_seqs) == (1, 100, 1600, 8)
    assert (d1.tpot_target_s, d1.cached_tokens, d1.kv_bytes_per_token) == (INTERACTIVE.tpot_s, 0, 1)


@pytest.mark.parametrize(("ordering", "ahead"), [("edf", 0), ("fcfs", 70)])
async def test_prompts_ahead_are_those_that_prefill_workers_serve_first(
    world: World, ordering: Literal["edf", "fcfs"], ahead: int
) -> None:
    """Decode workers always order by queue_priority. At work on each is one prompt, of which a step is always ahead."""
    dispatcher = Dispatcher(
        world.registry, world.predictions, world.chooser, clock=world.clock, prefill_ordering=ordering
    )
    for number, decision in enumerate((PAIR, PAIR, ALONE, ALONE)):
        world.dispatcher.book(world.record(str(number), slo=BATCH), decision)
    dispatcher.forecast(world.record(slo=INTERACTIVE))
    snapshots, _ = world.chooser.shown[-1]
    assert snapshots["p1"].queue.tokens == 70 + ahead
    assert snapshots["d1"].queue.tokens == 90


async def test_a_resumed_request_has_more_to_compute_and_less_to_generate(world: World) -> None:
    record = world.record()
    record.take(worker_pb2.TokenBatch(token_ids=[7, 8, 9]), 100)
    world.dispatcher.forecast(record)
    _, request = world.chooser.shown[-1]
    assert (request.num_prompt_tokens, request.max_tokens, request.is_resumed) == (103, 37, True)
    with world.dispatcher.book(record, ALONE):
        assert world.predictions.ledger.batch("d1") == (1, 103)
        assert record.timeline.routing == {}


async def test_prefix_caches_of_all_workers_are_looked_up_and_reported() -> None:
    index = Index({"p2": 64, "d1": 32})
    world = World(index=index)
    world.dispatcher.forecast(world.record())
    snapshots, _ = world.chooser.shown[-1]
    assert {name: snapshot.cached_tokens for name, snapshot in snapshots.items()} == {"p1": 0, "p2": 64, "d1": 32}
    for decision in (PAIR, ALONE):
        record = world.record()
        world.clock.now_s += 0.4  # in which it has waited, of the half second that was predicted
        world.dispatcher.book(record, decision).release()
    assert index.expected == [("p1", pytest.approx(55.5)), ("d1", pytest.approx(55.9))]


async def test_the_prompt_of_a_request_that_ends_is_forgotten() -> None:
    index = Index({})
    world = World(index=index)
    world.dispatcher.ended(world.record(cache_salt="salt"))
    assert index.forgotten == [(PROMPT, "salt")]


async def test_with_the_real_profile_bookings_spread_bursts() -> None:
    world = World()
    chooser = build_profile(RoutingConfig(local_prefill="never"), world.predictions.forecaster)
    dispatcher = Dispatcher(world.registry, world.predictions, chooser, clock=world.clock)
    taken = []
    for number in range(6):
        record = world.record(str(number))
        decision = dispatcher.forecast(record)
        assert decision is not None
        dispatcher.book(record, decision)
        taken.append(decision.prefill_id)
    assert sorted(taken) == ["p1"] * 3 + ["p2"] * 3
    assert world.dispatcher.missing_pools() == []
    world.registry.drain("d1")
    assert world.dispatcher.missing_pools() == [DECODE]
    assert dispatcher.forecast(world.record("late")) is None

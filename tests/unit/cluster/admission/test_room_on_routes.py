"""Room on many routes follows the same rule as on one; a full worker with a good score blocks no request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import OverloadedError
from baton.core.request import SamplingParams
from baton.core.slo import INTERACTIVE
from baton.core.timeline import Event, Timeline
from cluster.admission import tuning
from cluster.admission.room import Factors, Shortage, check_room, routes_with_room
from cluster.config.config import BatonConfig
from cluster.control_plane import create_admission
from cluster.latency.estimates import WorkerTraits
from cluster.latency.latency_model import LatencyModel
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import GenerationRequest
from cluster.requests.request_record import RequestRecord
from cluster.routing.dispatcher import Dispatcher, Placement
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_contracts import RouteDecision, RoutingRequest, WorkerSnapshot
from cluster.routing.routing_profile import build_profile
from cluster.telemetry.metrics import RouterMetrics
from tests.credentials import connect
from tests.fake_clock import FakeClock
from tests.unit.cluster.routing.worlds import decode_pools, make_candidates, prefill_pools, requests
from tests.worker_infos import make_info

factors = st.builds(Factors, st.floats(1, tuning.LARGEST_MARGIN), st.floats(1, tuning.LARGEST_MARGIN))


@given(
    prefill=prefill_pools,
    decode=decode_pools,
    request=requests,
    margins=factors,
    residents_ms=st.dictionaries(st.sampled_from(["decode-0", "decode-1"]), st.sampled_from([5.0, 15.0, 50.0])),
)
def test_a_route_has_room_exactly_when_the_check_finds_no_shortage(
    prefill: Sequence[WorkerSnapshot],
    decode: Sequence[WorkerSnapshot],
    request: RoutingRequest,
    margins: Factors,
    residents_ms: dict[str, float],
) -> None:
    candidates = make_candidates(prefill, decode, request)
    forecasts = candidates.forecasts

    def allowed_ms(decode_id: str) -> float:
        return residents_ms.get(decode_id, inf)

    limits = routes_with_room(candidates, 0.5, margins, allowed_ms)
    found = np.logical_and.reduce(list(limits.values()))
    assert found.shape == (len(candidates),)
    for index, has_room in enumerate(found):
        worker = candidates.route(index).decode
        decision = RouteDecision(
            None,
            worker.worker_id,
            0,
            float(forecasts.ttft_ms[index]),
            float(forecasts.tpot_ms[index]),
            float(forecasts.idle_ttft_ms.min()),
            float(forecasts.idle_tpot_ms.min()),
            has_capacity=worker.has_capacity(request.num_tokens),
        )
        check = check_room(
            decision,
            request.slo,
            request.elapsed_ms,
            0.5,
            margins,
            max_tokens=request.max_tokens,
            residents_tpot_ms=allowed_ms(worker.worker_id),
        )
        assert bool(has_room) == (check.shortage is None)
        assert limits["TTFT target"][index] == (check.shortage is not Shortage.PREFILL)
        if request.max_tokens > 1:
            has_kv, has_seat = worker.has_kv(request.num_tokens), worker.has_seat
            assert (limits["KV blocks"][index], limits["seats"][index]) == (has_kv, has_seat)


class Index:
    """A prefix index after which the first prefill worker holds all prompts."""

    def cached_tokens(self, worker_ids: Iterable[str], prompt: Sequence[int], salt: str = "") -> Mapping[str, int]:
        return {"prefill-1": len(prompt) - 1}

    def expect(self, worker_id: str, prompt: Sequence[int], until_s: float, salt: str = "") -> None:
        pass


COSTS = (5.0, 0.5, 1e-6, 0.1, 1e-4, 0.1)
"""A prompt token takes half a millisecond."""
IN_TURN = {"picker": "round_robin"}


class Cluster:
    """Two workers of each pool, of which the first are preferred; something is under way, so that load can be to blame.

    Args:
        routing: of the configuration.
        info: of the workers.
    """

    def __init__(self, routing: dict[str, str], index: Index | None = None, **info: Any) -> None:
        self.clock = FakeClock()
        self.registry, metrics = WorkerRegistry(connect, clock=self.clock), RouterMetrics(clock=self.clock)
        self.predictions = RequestPredictions(LatencyModel(self.clock), metrics.prediction_errors, self.clock)
        for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
            pool = name.split("-")[0]
            self.registry.add(make_info(name, pool, device="cuda:0", chunk_tokens=4096, **info))
            self.predictions.model.add_worker(name, WorkerTraits((pool,), 4096), COSTS)
        config = BatonConfig.from_dict({"routing": {"local_prefill": "never", **routing}})
        chooser = build_profile(config.routing, self.predictions.forecaster)
        self.dispatcher = Dispatcher(self.registry, self.predictions, chooser, index, self.clock)
        self.admission = create_admission(
            config,
            self.dispatcher,
            self.registry,
            self.predictions.model,
            metrics.admission,
            clock=self.clock,
            others_work=lambda: self.others_work,
        )
        self.others_work = False

    def record(self, num_tokens: int, request_id: str = "r", max_tokens: int = 40) -> RequestRecord:
        timeline = Timeline(request_id, clock=self.clock)
        timeline.record(Event.RECEIVED)
        params = SamplingParams(max_tokens=max_tokens)
        request = GenerationRequest(request_id, tuple(range(num_tokens)), params, timeline, slo=INTERACTIVE)
        record = RequestRecord(request, 100.0, self.clock)
        record.attempt = 1
        return record

    def occupy(self, num_tokens: int, *, first: int = 1, computed: bool = False) -> None:
        """Loads workers; the first workers stay next in turn."""
        route = RouteDecision(f"prefill-{first}", f"decode-{first}", 0, 1.0, 1.0)
        record = self.record(num_tokens, f"other-{first}")
        self.dispatcher.book(record, route)
        if computed:
            self.predictions.tokens(record, 1)
        self.next_turn()

    def next_turn(self) -> None:
        """Makes the first workers next in turn."""
        for worker in self.registry.workers:
            worker.last_assigned_s = float(worker.info.worker_id[-1])

    async def admit(self, num_tokens: int = 100, max_tokens: int = 40) -> Placement:
        first = self.record(8, "first")
        await self.admission.admit(first)
        self.predictions.tokens(first, 1)
        self.next_turn()
        try:
            return await self.admission.admit(self.record(num_tokens, max_tokens=max_tokens))
        finally:
            self.admission.close()


def prefill_id(placement: Placement) -> str:
    assert placement.prefill is not None
    return placement.prefill.info.worker_id


async def test_an_idle_cluster_gives_the_preferred_workers() -> None:
    placement = await Cluster(IN_TURN).admit()
    assert (prefill_id(placement), placement.decode.info.worker_id) == ("prefill-1", "decode-1")


async def test_if_the_next_worker_in_turn_is_late_a_timely_route_is_taken() -> None:
    cluster = Cluster(IN_TURN)
    cluster.occupy(4000)  # two seconds of prompts, and a target of one
    assert prefill_id(await cluster.admit()) == "prefill-2"


async def test_if_the_best_score_is_late_a_timely_route_is_taken() -> None:
    """What the first worker holds of the prompt is worth more than the wait there costs, but for the target."""
    cluster = Cluster({}, Index())
    cluster.occupy(1750)  # cached prompts, or else 875 ms of them
    decision = cluster.dispatcher.forecast(cluster.record(1400))
    assert decision is not None
    assert (decision.prefill_id, decision.ttft_ms) == ("prefill-1", pytest.approx(890, abs=15))
    assert prefill_id(await cluster.admit(1400)) == "prefill-2"


async def test_without_room_on_any_route_the_request_is_refused() -> None:
    cluster = Cluster(IN_TURN)
    for first in (1, 2):
        cluster.occupy(4000, first=first)
    with pytest.raises(OverloadedError) as raised:
        await cluster.admit()
    assert raised.value.reason == "prefill"


async def test_the_work_of_other_routers_can_be_to_blame_for_a_shortage() -> None:
    """A request is admitted however slow it will be if nothing is in progress: here, or on any router."""
    for others_work in (False, True):
        cluster = Cluster(IN_TURN)
        cluster.others_work = others_work
        for first in (1, 2):
            cluster.occupy(4000, first=first)
        if others_work:
            with pytest.raises(OverloadedError):
                await cluster.admission.admit(cluster.record(100))
        else:
            assert await cluster.admission.admit(cluster.record(100))
        cluster.admission.close()


@pytest.mark.parametrize(
    ("info", "occupied"), [({"max_num_seqs": 2}, {"num_tokens": 1}), ({"kv_blocks": 20}, {"num_tokens": 200})]
)
async def test_if_the_next_worker_in_turn_has_no_slot_another_is_taken(
    info: dict[str, int], occupied: dict[str, int]
) -> None:
    """No place in a step, or a cache of 320 tokens in which there is room for the prompt, but not for the answer."""
    cluster = Cluster(IN_TURN, **info)
    cluster.occupy(**occupied, computed=True)
    assert (await cluster.admit()).decode.info.worker_id == "decode-2"


@pytest.mark.parametrize(
    ("info", "occupied"), [({"max_num_seqs": 1}, {"num_tokens": 1}), ({"kv_blocks": 20}, {"num_tokens": 200})]
)
async def test_a_request_without_a_place_says_what_it_waited_for(
    info: dict[str, int], occupied: dict[str, int]
) -> None:
    cluster = Cluster(IN_TURN, **info)
    cluster.others_work = True
    for first in (1, 2):
        cluster.occupy(**occupied, computed=True, first=first)
    record = cluster.record(100)
    with pytest.raises(OverloadedError, match="no worker has enough free KV blocks and batch slots"):
        await cluster.admission.admit(record)
    assert record.timeline.attributes["admission_waited_for"] == "seat"
    cluster.admission.close()


async def test_a_single_token_needs_no_room_for_a_typical_answer() -> None:
    cluster = Cluster(IN_TURN, kv_blocks=25)
    cluster.occupy(200, computed=True)
    assert (await cluster.admit(max_tokens=1)).decode.info.worker_id == "decode-1"

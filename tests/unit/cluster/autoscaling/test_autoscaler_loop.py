"""The loop around the pure function: what it sees of router and model, and what it tells the owner of the pools."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import pytest
from prometheus_client import CollectorRegistry

from baton.core.queue_priority import QueuePriority
from baton.core.roles import DECODE, POOLS, PREFILL
from baton.core.slo import INTERACTIVE
from baton.core.step_costs import StepSample
from cluster.autoscaling.advice import Advice
from cluster.autoscaling.autoscaler import AutoscalerState, ScalingPlan, plan
from cluster.autoscaling.autoscaler_config import AutoscalerConfig
from cluster.autoscaling.autoscaler_loop import AutoscalerLoop
from cluster.autoscaling.autoscaling_metrics import AutoscalerMetrics
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.observation import PoolCounts
from cluster.autoscaling.traffic import TrafficMeter
from cluster.latency.feed import traits_of
from cluster.latency.latency_model import LatencyModel
from cluster.latency.ledger import WorkLedger
from cluster.registry.workers import WorkerRegistry
from tests.credentials import connect
from tests.request_records import make_record
from tests.step_cost_reports import report_of
from tests.waiting import TIMEOUT_S
from tests.worker_infos import make_info

WORKERS = ("prefill-1", "decode-1")


class Control:
    """Pools that are at once what they shall be."""

    def __init__(self) -> None:
        self.sizes = dict.fromkeys(POOLS, 1)
        self.calls: list[tuple[dict[str, int], tuple[str, str] | None]] = []
        self.error: Exception | None = None
        self.refusal: Exception | None = None

    async def pool_counts(self):
        if self.error is not None:
            raise self.error
        return {name: PoolCounts(size, size) for name, size in self.sizes.items()}, "not here"

    async def autoscale(self, targets, role_change):
        if self.refusal is not None:
            raise self.refusal
        self.calls.append((targets, role_change))
        self.sizes |= targets


class Looped:
    """A loop over one worker of each pool, whose steps take 5 ms and half a millisecond per prompt token."""

    def __init__(self, *, is_enabled: bool = True, interval: float = 5.0) -> None:
        self.now_s = 100.0
        self.control, self.registry = Control(), WorkerRegistry(connect)
        self.model, self.ledger = LatencyModel(lambda: self.now_s), WorkLedger()
        self.traffic = TrafficMeter(lambda: self.now_s)
        self.metrics = CollectorRegistry()
        self.waiting = 0
        limits = AutoscalerConfig(enabled=True, interval=interval).to_limits(is_local=True)
        self.loop = AutoscalerLoop(
            self.control, self.registry, self.model, self.ledger, self.traffic, limits, AutoscalerMetrics(self.metrics),
            num_waiting=lambda: self.waiting, is_enabled=is_enabled, clock=lambda: self.now_s,
        )  # fmt: skip
        for worker_id in WORKERS:
            info = make_info(worker_id, worker_id.split("-")[0], chunk_tokens=2048, kv_blocks=10_000)
            self.registry.add(info)
            self.model.add_worker(worker_id, traits_of(info))
            self.model.update_worker(worker_id, report_of(sample(index) for index in range(200)))

    def arrive(self, seconds: float, rate: float) -> None:
        for _ in range(round(seconds * rate)):
            self.now_s += 1 / rate
            self.traffic.arrived(make_record(400, INTERACTIVE))

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.get_sample_value(f"baton_{name}", labels)


def sample(index: int) -> StepSample:
    values = dict.fromkeys(StepSample._fields, 0)
    if index % 2:
        values |= {"sequences": 1, "prompt_tokens": 50 * (index % 20 + 1)}
    else:
        batch = index % 16 + 1
        values |= {"sequences": batch, "decoding": batch, "context_tokens": 500 * batch}
    ms = 5.0 + 0.5 * values["prompt_tokens"] + 0.2 * values["sequences"]
    return StepSample(**{**values, "ms": ms})


async def test_overload_starts_workers():
    looped = Looped()
    looped.arrive(60, 20)
    decided = await looped.loop.step()
    [(targets, role_change)] = looped.control.calls
    # 20 requests a second, of 205 ms each.
    assert targets[PREFILL] >= 5
    assert role_change is None
    assert decided.pools[PREFILL].target == targets[PREFILL]
    assert looped.value("autoscaler_wanted_workers", pool=PREFILL) == targets[PREFILL]
    assert looped.value("autoscaler_utilisation_ratio", pool=PREFILL) > 1
    assert looped.value("autoscaler_predicted_attainment_ratio", pool=PREFILL) < 0.5
    assert looped.value("autoscaler_decisions_total", pool=PREFILL, direction="up", reason="load") == 1
    await looped.loop.step()
    assert len(looped.control.calls) == 1  # nothing is said twice


async def test_a_disabled_autoscaler_plans_and_changes_nothing():
    looped = Looped(is_enabled=False)
    looped.arrive(60, 20)
    await looped.loop.step()
    told = json.loads(json.dumps(await looped.loop.look()))
    assert not told["enabled"]
    assert told["pools"][PREFILL]["target"] >= 5
    assert told["move_obstacle"] == "not here"
    assert told["traffic"]["requests_per_s"] == pytest.approx(20, rel=0.1)
    assert looped.control.calls == []
    assert looped.value("autoscaler_wanted_workers", pool=PREFILL) >= 5
    assert looped.value("autoscaler_decisions_total", pool=PREFILL, direction="up", reason="load") == 0


async def test_reading_the_plan_does_not_advance_time():
    looped = Looped()
    looped.control.sizes = {PREFILL: 3, DECODE: 3}
    for _ in range(50):
        await looped.loop.look()
        looped.now_s += 5
    assert (await looped.loop.look())["pools"][PREFILL]["target"] == 3
    await looped.loop.step()
    looped.now_s += 31
    assert (await looped.loop.look())["pools"][PREFILL]["target"] == 2


async def test_a_failed_change_is_not_recorded():
    looped = Looped()
    looped.control.sizes = {PREFILL: 3, DECODE: 3}
    await looped.loop.step()
    looped.now_s += 31
    looped.control.refusal = RuntimeError("not now")
    with pytest.raises(RuntimeError):
        await looped.loop.step()
    looped.control.refusal = None
    await looped.loop.step()  # at once: nobody was taken away yet
    assert looped.control.sizes == {PREFILL: 2, DECODE: 2}


async def test_advice_uses_the_same_observation():
    looped = Looped()
    assert "not enough traffic yet" in (await looped.loop.advise())["texts"][0]
    looped.arrive(60, 4)
    advice = json.loads(json.dumps(await looped.loop.advise()))
    assert advice["rate"] == pytest.approx(4, rel=0.1)
    assert advice["now"]["prefill"] == 1
    assert len(advice["texts"]) >= 3


async def test_sequences_count_as_decoding_only_after_their_prompts():
    looped = Looped()
    for index in range(10):
        looped.ledger.begin_decoding("decode-1", f"r{index}", 100)
    for index in range(4):
        looped.ledger.begin_prompt("prefill-1", f"r{index}", 100, 0, looped.now_s)
    looped.loop.sample()
    assert looped.traffic.load(PREFILL)[0] == 4
    assert looped.traffic.load(DECODE)[0] == 6


async def test_the_least_urgent_prompts_are_counted():
    looped = Looped()
    nightly = QueuePriority(-1, looped.now_s + 600.0, 600.0)
    for index in range(6):
        looped.ledger.begin_decoding("decode-1", f"r{index}", 100)
        looped.ledger.begin_prompt("prefill-1", f"r{index}", 100, 0, looped.now_s, nightly)
    looped.loop.sample()
    assert (looped.traffic.load(PREFILL)[0], looped.traffic.load(DECODE)[0]) == (6, 0)


async def test_requests_waiting_in_the_router_are_counted():
    looped = Looped()
    looped.arrive(60, 4)
    before = (await looped.loop.look())["pools"][PREFILL]["wanted"]
    looped.waiting = 60
    after = (await looped.loop.look())["pools"][PREFILL]["wanted"]
    assert after > before


async def test_plans_and_advice_are_computed_off_the_event_loop():
    looped = Looped()
    looped.arrive(60, 20)
    ways = []

    async def offload(work):
        ways.append(await asyncio.to_thread(lambda: (threading.current_thread(), work())))
        return ways[-1][1]

    looped.loop._offload = offload
    for look, expected in (
        (looped.loop.step, {Demand, ScalingPlan}),
        (looped.loop.look, {Demand, ScalingPlan, dict}),
        (looped.loop.advise, {Advice, dict}),
    ):
        ways.clear()
        await look()
        assert {type(result) for _, result in ways} == expected
        assert threading.main_thread() not in {thread for thread, _ in ways}


async def test_the_inputs_of_a_plan_do_not_change_while_it_is_made():
    """While a plan is made, requests come and workers tell what their steps cost."""
    looped = Looped()
    looped.arrive(60, 20)
    before, seen = await looped.loop.observe(), await looped.loop.observe()
    limits = AutoscalerConfig(enabled=True).to_limits(is_local=True)
    first = plan(before, limits, AutoscalerState())
    looped.arrive(60, 90)
    for worker_id in WORKERS:
        looped.model.update_worker(worker_id, report_of(sample(index)._replace(ms=500.0) for index in range(400)))
        looped.model.remove_worker(worker_id)
    assert plan(seen, limits, AutoscalerState()) == first


async def test_a_delayed_loop_makes_one_plan_and_not_all_missed_ones():
    looped, steps, first = Looped(interval=0.01), [], asyncio.Event()

    async def step():
        steps.append(looped.now_s)
        if len(steps) == 1:
            looped.now_s += 100.0
            first.set()

    looped.loop.step = step
    running = asyncio.create_task(looped.loop.run())
    await asyncio.sleep(0)
    looped.now_s += 1.0
    async with asyncio.timeout(TIMEOUT_S):
        await first.wait()
    for _ in range(10):
        await asyncio.sleep(0.01)  # the clock stands still: one plan is due, and no more
    assert len(steps) == 2
    running.cancel()


async def test_a_failing_controller_does_not_end_the_loop(caplog):
    looped = Looped(interval=0.01)
    looped.control.error = RuntimeError("no answer")
    running = asyncio.create_task(looped.loop.run())

    async def until(text: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while text not in caplog.text:
                looped.now_s += 1
                await asyncio.sleep(0.01)

    await until("a plan failed")
    looped.control.error = None
    looped.arrive(60, 20)
    async with asyncio.timeout(TIMEOUT_S):
        while not looped.control.calls:
            looped.now_s += 0.1
            await asyncio.sleep(0.01)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running

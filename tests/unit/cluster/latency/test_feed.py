"""Step costs on their way from workers to the model, and on their way to the disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.core.errors import WorkerLostError
from baton.rpc.step_cost_messages import pack_step_costs, unpack_step_costs
from baton.rpc.wire import worker_pb2
from cluster.latency.feed import StepCostFeed, traits_of
from cluster.latency.latency_model import LatencyModel
from cluster.latency.store import FitStore
from cluster.registry.workers import Worker, WorkerRegistry
from cluster.simulation.virtual_loop import run_virtually
from tests.credentials import connect
from tests.unit.cluster.latency.synthetic_workers import SyntheticWorker
from tests.waiting import TIMEOUT_S, until
from tests.worker_infos import make_info


@dataclass
class LearningClient:
    """Stands for :class:`cluster.registry.worker_client.WorkerClient`, with the worker behind it."""

    worker: SyntheticWorker = field(default_factory=SyntheticWorker)
    is_dead: bool = False
    num_asked: int = 0

    def run(self, num_steps: int) -> None:
        self.worker.run(self.worker.steps(num_steps), 0.0)

    async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
        self.num_asked += 1
        if self.is_dead:
            raise WorkerLostError("gone")
        return worker_pb2.WorkerStats(step_costs=pack_step_costs(self.worker.run([], 0.0)))


def add_worker(registry: WorkerRegistry, client: LearningClient, worker_id: str = "d1") -> Worker:
    worker = Worker(make_info(worker_id, "decode"), client)  # type: ignore[arg-type]
    registry._workers[worker_id] = worker
    return worker


def test_step_costs_travel_unchanged() -> None:
    worker = SyntheticWorker()
    sent = worker.run(worker.steps(100), 0.0)
    received = unpack_step_costs(worker_pb2.StepCosts.FromString(pack_step_costs(sent).SerializeToString()))
    assert received._replace(rates=sent.rates) == sent
    assert received.rates.sums == sent.rates.sums
    assert len(sent.rates.sums) > 3


async def test_what_a_worker_learns_reaches_the_model() -> None:
    registry, model, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    feed = StepCostFeed(registry, model)
    client.run(10)  # its profile
    await feed.add(add_worker(registry, client))
    assert model.num_samples("d1") == 10
    client.run(5)
    await feed.poll()
    assert model.num_samples("d1") == 15


async def test_costs_of_another_shape_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class NewerClient(LearningClient):
        async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
            return worker_pb2.WorkerStats(step_costs=worker_pb2.StepCosts(coefficients=[1.0] * 9, num_samples=50))

    registry, model = WorkerRegistry(connect), LatencyModel()
    await StepCostFeed(registry, model).add(add_worker(registry, NewerClient()))
    assert model.num_samples("d1") == 0
    assert "9 step cost coefficients" in caplog.text


async def test_the_profile_of_a_worker_not_yet_added_is_kept() -> None:
    """Its clock is measured and its kind's fit is read in between, and a round may come then."""
    registry, model, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    feed = StepCostFeed(registry, model)
    client.run(10)
    worker = add_worker(registry, client)
    await feed.poll()
    await feed.add(worker)
    assert model.num_samples("d1") == 10


async def test_a_worker_is_not_polled_before_it_has_answered() -> None:
    answers = asyncio.Event()

    class SlowClient(LearningClient):
        async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
            found = await super().stats(timeout_s)
            await answers.wait()
            return found

    registry, model, client = WorkerRegistry(connect), LatencyModel(), SlowClient()
    feed = StepCostFeed(registry, model)
    client.run(10)
    adding = asyncio.create_task(feed.add(add_worker(registry, client)))
    await until(lambda: client.num_asked == 1)
    async with asyncio.timeout(TIMEOUT_S):
        await feed.poll()
    answers.set()
    await adding
    await feed.poll()
    assert client.num_asked == 2
    assert model.num_samples("d1") == 10


async def test_a_worker_that_does_not_answer_is_polled_again() -> None:
    registry, model, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    feed = StepCostFeed(registry, model)
    await feed.add(add_worker(registry, client))
    client.is_dead = True
    client.run(5)
    await feed.poll()
    client.is_dead = False
    await feed.poll()
    assert model.num_samples("d1") == 5


async def test_a_removed_worker_is_forgotten() -> None:
    registry, model, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    feed = StepCostFeed(registry, model)
    client.run(5)
    await feed.add(add_worker(registry, client))
    feed.remove("d1")
    registry._workers.clear()
    await feed.poll()
    assert model.num_samples("d1") == 0


async def test_the_next_start_uses_the_last_fit(tmp_path: Path) -> None:
    registry, model, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    feed = StepCostFeed(registry, model, FitStore(tmp_path))
    worker = add_worker(registry, client)
    await feed.add(worker)
    client.worker.scale = 7.0
    for _ in range(20):
        client.run(20)
        await feed.poll()
    await feed.save()
    registry, later, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    await StepCostFeed(registry, later, FitStore(tmp_path)).add(add_worker(registry, client))
    assert 0.8 < later.step_ms("d1", 8, 4000).ms / model.step_ms("d1", 8, 4000).ms < 1.25
    assert LatencyModel().step_ms("d1", 8, 4000).ms < 0.5 * later.step_ms("d1", 8, 4000).ms


def test_workers_of_one_kind_share_a_fit() -> None:
    one, other = make_info("d1", "decode"), make_info("d2", "decode", node="elsewhere")
    assert traits_of(one) == traits_of(other)
    for change in ({"device": "gpu"}, {"dtype": "float16"}, {"num_threads": 9}, {"kv_fingerprint": "x"}):
        assert traits_of(make_info("d3", "decode", **change)).kind != traits_of(one).kind


async def test_a_worker_of_another_kind_can_join_while_fits_are_saved(tmp_path: Path) -> None:
    registry, model, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    client.run(60)
    feed = StepCostFeed(registry, model, FitStore(tmp_path))
    await feed.add(add_worker(registry, client))
    saving = asyncio.create_task(feed.save())
    await asyncio.sleep(0)  # it waits for the disk now
    feed._kinds.add(("another",))
    await saving
    assert FitStore(tmp_path).load(traits_of(make_info("d1", "decode")).kind)


def test_a_round_polls_one_worker_after_the_other() -> None:
    async def run() -> list[float]:
        loop, queued_s = asyncio.get_running_loop(), []

        class TimedClient(LearningClient):
            async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
                queued_s.append(loop.time())
                return await super().stats(timeout_s)

        registry = WorkerRegistry(connect)
        feed = StepCostFeed(registry, LatencyModel())
        for number in range(4):
            await feed.add(add_worker(registry, TimedClient(), f"d{number}"))
        queued_s.clear()
        await feed.poll(0.8)
        return queued_s

    assert run_virtually(run) == pytest.approx([0.0, 0.2, 0.4, 0.6])


async def test_polling_continues_after_a_failed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    async def poll(self: StepCostFeed, over_s: float) -> None:
        rounds.append(1)
        raise RuntimeError("this round is broken")

    monkeypatch.setattr("cluster.latency.feed.POLL_S", 0.001)
    monkeypatch.setattr(StepCostFeed, "poll", poll)
    running = asyncio.create_task(StepCostFeed(WorkerRegistry(connect), LatencyModel()).run())
    await until(lambda: len(rounds) >= 3)
    running.cancel()


async def test_a_worker_removed_while_its_fit_is_read_is_not_added(tmp_path: Path) -> None:
    registry, model, client = WorkerRegistry(connect), LatencyModel(), LearningClient()
    feed = StepCostFeed(registry, model, FitStore(tmp_path))
    worker = add_worker(registry, client)
    registry._workers.clear()
    await feed.add(worker)
    assert client.num_asked == 0
    assert "d1" not in model._workers

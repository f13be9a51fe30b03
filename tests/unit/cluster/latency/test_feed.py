"""Step samples on their way from workers to the model, and fits on their way to the disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.core.errors import WorkerLostError
from baton.core.step_samples import StepSample, StepSamples
from baton.rpc.wire import worker_pb2
from cluster.latency.feed import SampleFeed, traits_of, unpack_step_samples
from cluster.latency.latency_model import LatencyModel
from cluster.latency.store import FitStore
from cluster.registry.workers import Worker, WorkerRegistry
from cluster.simulation.virtual_loop import run_virtually
from cluster.worker.role import pack_step_samples
from tests.unit.cluster.latency.synthetic_workers import SyntheticWorker
from tests.waiting import until
from tests.worker_infos import make_info


@dataclass
class SamplingClient:
    """Stands for :class:`cluster.registry.worker_client.WorkerClient`."""

    samples: StepSamples = field(default_factory=StepSamples)
    is_dead: bool = False
    asked_after: list[int | None] = field(default_factory=list)

    def run(self, steps: list[StepSample]) -> None:
        for step in steps:
            self.samples.add(step)

    async def stats(self, timeout_s: float = 2.0, samples_after: int | None = None) -> worker_pb2.WorkerStats:
        self.asked_after.append(samples_after)
        if self.is_dead:
            raise WorkerLostError("gone")
        found = pack_step_samples(self.samples.last_index, self.samples.after(samples_after or 0))
        return worker_pb2.WorkerStats(step_samples=found)


def add_worker(registry: WorkerRegistry, client: SamplingClient, worker_id: str = "d1") -> Worker:
    worker = Worker(make_info(worker_id, "decode"), client)  # type: ignore[arg-type]
    registry._workers[worker_id] = worker
    return worker


def test_samples_travel_unchanged() -> None:
    steps = [StepSample(12.5, 0, 0, 4, 4, 1234, 8, 3), StepSample(100.0, 512, 2**40, 2, 1, 7, 0, 0)]
    message = worker_pb2.StepSamples.FromString(pack_step_samples(9, steps).SerializeToString())
    assert message.last_index == 9
    assert unpack_step_samples(message) == steps
    assert unpack_step_samples(pack_step_samples(3, [])) == []


def test_columns_of_unequal_length_are_cut() -> None:
    message = pack_step_samples(1, [StepSample(1.0, 0, 0, 1, 1, 5, 0, 0)])
    message.ms.append(2.0)
    assert len(unpack_step_samples(message)) == 1


async def test_every_sample_is_learned_from_once() -> None:
    registry, model, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    feed = SampleFeed(registry, model)
    client.run(SyntheticWorker().steps(10))  # its profile
    await feed.add(add_worker(registry, client))
    assert model.num_samples("d1") == 10
    await feed.poll()
    assert model.num_samples("d1") == 10
    client.run(SyntheticWorker().steps(5))
    await feed.poll()
    assert model.num_samples("d1") == 15
    assert client.asked_after == [0, 10, 10]


async def test_the_profile_of_a_worker_that_is_known_but_not_added_yet_is_kept() -> None:
    """Its clock is measured and its kind's fit is read in between, and a round may come then."""
    registry, model, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    feed = SampleFeed(registry, model)
    client.run(SyntheticWorker().steps(10))
    worker = add_worker(registry, client)
    await feed.poll()
    await feed.add(worker)
    assert model.num_samples("d1") == 10


async def test_a_worker_is_not_asked_again_before_it_has_answered() -> None:
    answers = asyncio.Event()

    class SlowClient(SamplingClient):
        async def stats(self, timeout_s: float = 2.0, samples_after: int | None = None) -> worker_pb2.WorkerStats:
            found = await super().stats(timeout_s, samples_after)
            await answers.wait()
            return found

    registry, model, client = WorkerRegistry(), LatencyModel(), SlowClient()
    feed = SampleFeed(registry, model)
    client.run(SyntheticWorker().steps(10))
    adding = asyncio.create_task(feed.add(add_worker(registry, client)))
    await until(lambda: client.asked_after == [0])
    async with asyncio.timeout(5):
        await feed.poll()
    answers.set()
    await adding
    await feed.poll()
    assert client.asked_after == [0, 10]
    assert model.num_samples("d1") == 10


async def test_a_worker_that_does_not_answer_is_asked_again() -> None:
    registry, model, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    feed = SampleFeed(registry, model)
    await feed.add(add_worker(registry, client))
    client.is_dead = True
    client.run(SyntheticWorker().steps(5))
    await feed.poll()
    client.is_dead = False
    await feed.poll()
    assert model.num_samples("d1") == 5


async def test_a_worker_that_left_is_forgotten() -> None:
    registry, model, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    feed = SampleFeed(registry, model)
    client.run(SyntheticWorker().steps(5))
    await feed.add(add_worker(registry, client))
    feed.remove("d1")
    registry._workers.clear()
    await feed.poll()
    assert model.num_samples("d1") == 0


async def test_the_next_start_begins_with_the_last_fit(tmp_path: Path) -> None:
    registry, model, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    feed = SampleFeed(registry, model, FitStore(tmp_path))
    worker = add_worker(registry, client)
    await feed.add(worker)
    for _ in range(20):
        client.run(SyntheticWorker(scale=7.0).steps(20))
        await feed.poll()
    await feed.save()
    registry, later, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    await SampleFeed(registry, later, FitStore(tmp_path)).add(add_worker(registry, client))
    assert 0.8 < later.step_ms("d1", 8, 4000).ms / model.step_ms("d1", 8, 4000).ms < 1.25
    assert LatencyModel().step_ms("d1", 8, 4000).ms < 0.5 * later.step_ms("d1", 8, 4000).ms


def test_workers_of_one_kind_share_a_fit() -> None:
    one, other = make_info("d1", "decode"), make_info("d2", "decode", node="elsewhere")
    assert traits_of(one) == traits_of(other)
    for change in ({"device": "gpu"}, {"dtype": "float16"}, {"num_threads": 9}, {"kv_fingerprint": "x"}):
        assert traits_of(make_info("d3", "decode", **change)).kind != traits_of(one).kind


async def test_a_worker_of_another_kind_may_come_while_fits_are_written(tmp_path: Path) -> None:
    registry, model, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    client.run(SyntheticWorker().steps(60))
    feed = SampleFeed(registry, model, FitStore(tmp_path))
    await feed.add(add_worker(registry, client))
    saving = asyncio.create_task(feed.save())
    await asyncio.sleep(0)  # it waits for the disk now
    feed._kinds.add(("another",))
    await saving
    assert FitStore(tmp_path).load(traits_of(make_info("d1", "decode")).kind)


def test_a_round_asks_one_worker_after_the_other() -> None:
    async def run() -> list[float]:
        loop, queued_s = asyncio.get_running_loop(), []

        class TimedClient(SamplingClient):
            async def stats(self, timeout_s: float = 2.0, samples_after: int | None = None) -> worker_pb2.WorkerStats:
                queued_s.append(loop.time())
                return await super().stats(timeout_s, samples_after)

        registry = WorkerRegistry()
        feed = SampleFeed(registry, LatencyModel())
        for number in range(4):
            await feed.add(add_worker(registry, TimedClient(), f"d{number}"))
        queued_s.clear()
        await feed.poll(0.8)
        return queued_s

    assert run_virtually(run) == pytest.approx([0.0, 0.2, 0.4, 0.6])


async def test_a_round_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    async def poll(self: SampleFeed, over_s: float) -> None:
        rounds.append(1)
        raise RuntimeError("this round is broken")

    monkeypatch.setattr("cluster.latency.feed.POLL_S", 0.001)
    monkeypatch.setattr(SampleFeed, "poll", poll)
    running = asyncio.create_task(SampleFeed(WorkerRegistry(), LatencyModel()).run())
    await until(lambda: len(rounds) >= 3)
    running.cancel()


async def test_a_worker_that_left_while_its_fit_was_read_is_not_added(tmp_path: Path) -> None:
    registry, model, client = WorkerRegistry(), LatencyModel(), SamplingClient()
    feed = SampleFeed(registry, model, FitStore(tmp_path))
    worker = add_worker(registry, client)
    registry._workers.clear()
    await feed.add(worker)
    assert client.asked_after == []
    assert not model._workers

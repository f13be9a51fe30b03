"""What compiles while a worker starts leaves no trace in anything that learns from steps."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.step_outliers import is_outlier
from baton.core.step_samples import StepSample
from baton.engine.async_engine import AsyncEngine
from baton.engine.batch.batch import ForwardBatch
from baton.engine.profile import profile_steps
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.step_cost_fit import StepCostFit
from cluster.latency.estimates import WorkerTraits
from cluster.latency.latency_model import LatencyModel
from tests.engine_runs import build_runner
from tests.prompt_budget import prompt_budget
from tests.tiny_models import tiny_model
from tests.toy_proposers import Oracle

HELD_UP_S = 2.0
LIMITS = SchedulerLimits(chunk_tokens=96, max_num_seqs=16, max_model_len=128)


class TimedRunner:
    """A runner whose forwards take virtual time, on a device of a given type.

    Args:
        compiles: the first forward of each number of tokens takes 2 s longer.
        held_up: numbers of the forwards that take 2 s longer, counted from the first one.
    """

    def __init__(
        self, runner: ModelRunner, device_type: str, *, compiles: bool = False, held_up: frozenset[int] = frozenset()
    ) -> None:
        self._runner = runner
        self.device = SimpleNamespace(type=device_type)
        self.now_s = 100.0
        self.sizes: list[int] = []
        self._compiles, self._held_up = compiles, held_up

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def monotonic(self) -> float:
        return self.now_s

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        is_held_up = len(self.sizes) in self._held_up or (self._compiles and batch.num_tokens not in self.sizes)
        self.now_s += 0.008 + 0.0001 * batch.num_tokens + HELD_UP_S * is_held_up
        self.sizes.append(batch.num_tokens)
        return self._runner.forward(batch)


@dataclass(slots=True)
class Recording(Oracle):
    """Drafts nothing and remembers what forwards cost."""

    forward_ms: list[float] = field(default_factory=list)

    def observe_step(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        self.forward_ms.append(ms)


@dataclass(slots=True)
class Learned:
    """What is left of a profile: with the router, with the engine's chunk budget and with its proposer."""

    samples: list[StepSample]
    fit: StepCostFit
    forward_ms: list[float]
    sizes: list[int]


async def profile(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str = "cuda",
    *,
    compiles: bool = False,
    held_up: frozenset[int] = frozenset(),
) -> Learned:
    model_runner = build_runner(tiny_model("llama"), num_blocks=64, decoder="transformers")
    runner = TimedRunner(model_runner, device_type, compiles=compiles, held_up=held_up)
    proposer, fit = Recording(defaultdict(list), "silent"), StepCostFit()
    engine = AsyncEngine(runner, LIMITS, proposer=proposer)  # type: ignore[arg-type]
    engine.subscribe(fit)
    for module in ("baton.engine.engine", "baton.engine.step.step_meter", "baton.engine.profile"):
        monkeypatch.setattr(f"{module}.time", runner)
    engine.start()
    try:
        await profile_steps(engine, LIMITS.max_model_len)
        _, samples = await engine.step_samples(0)
    finally:
        await engine.stop()
    return Learned(samples, fit, proposer.forward_ms, runner.sizes)


def assert_nothing_took_seconds(learned: Learned) -> None:
    assert max(sample.ms for sample in learned.samples) < 100
    assert max(learned.forward_ms) < 100
    router = LatencyModel()
    router.add_worker("w", WorkerTraits(("prefill", "cuda"), LIMITS.chunk_tokens))
    router.observe_steps("w", learned.samples)
    costs = learned.fit.pace().costs
    for sample in learned.samples:
        context = sample.context_tokens
        expected = 8 + 0.1 * (sample.prompt_tokens or sample.sequences)
        if sample.prompt_tokens:
            predicted = router.prefill_ms("w", sample.prompt_tokens).ms
            own = costs.fixed + costs.chunk_ms(sample.prompt_tokens, 0)
        else:
            predicted = router.step_ms("w", sample.decoding, context).ms
            own = costs.decode_ms(sample.decoding, context)
        assert predicted == pytest.approx(expected, rel=0.3)
        assert own == pytest.approx(expected, rel=0.3)
    # 60 % of a target of 25 ms leave 6 ms beside a decode step of 9 ms, but nothing where steps seem to take seconds.
    assert prompt_budget(LIMITS.chunk_tokens, 4, 200, 0.025, costs) > 40


async def test_nothing_learns_from_compilations_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = await profile(monkeypatch, compiles=True)
    assert_nothing_took_seconds(learned)
    assert len(learned.forward_ms) == len(learned.samples)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
async def test_nothing_learns_from_the_first_run(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    assert_nothing_took_seconds(await profile(monkeypatch, device_type, held_up=frozenset({0})))


@pytest.mark.parametrize("index", [20, 27])
async def test_nothing_learns_from_a_step_that_is_held_up_later(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    assert_nothing_took_seconds(await profile(monkeypatch, held_up=frozenset({index})))


async def test_a_profile_reaches_the_largest_chunk_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = (await profile(monkeypatch)).samples
    assert {sample.prompt_tokens for sample in samples} >= {16, 32, 64, LIMITS.chunk_tokens}
    # All requests of a run share its steps: there are no batches in between.
    assert {sample.sequences for sample in samples} == {1, 4, LIMITS.max_num_seqs}


async def test_a_cpu_warms_up_with_one_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU goes through all runs once before it measures, a CPU does not."""
    cpu, gpu = await profile(monkeypatch, "cpu"), await profile(monkeypatch, "cuda")
    assert len(cpu.sizes) - len(cpu.samples) <= 4
    assert len(gpu.sizes) - len(gpu.samples) > len(gpu.samples) / 5


def prompt(ms: float, num_tokens: int) -> StepSample:
    return StepSample(ms, num_tokens, num_tokens * (num_tokens + 1) // 2, 1, 0, 0, 0, 0)


def test_an_outlier_is_known_by_its_neighbours_where_it_is_the_only_one_of_its_size() -> None:
    samples = [prompt(9.0, 16), prompt(9.5, 64), prompt(2000.0, 256), prompt(30.0, 1024), prompt(200.0, 4096)]
    assert [is_outlier(index, samples) for index in range(5)] == [False, False, True, False, False]
    assert not is_outlier(0, [prompt(2000.0, 16)])  # with nothing to compare with


def test_noise_is_no_outlier() -> None:
    rng = random.Random(5)
    samples = [prompt((8 + 0.1 * size) * rng.lognormvariate(0, 0.5), size) for size in (16, 64, 256, 1024) * 4]
    assert not any(is_outlier(index, samples) for index in range(len(samples)))

"""What compiles while a worker starts leaves no trace in anything that learns from steps."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.step_costs import StepCostReport, StepSample
from baton.engine.async_engine import AsyncEngine
from baton.engine.batch.batch import ForwardBatch
from baton.engine.profile import profile_steps
from baton.engine.runner.model_runner import ModelRunner
from cluster.latency.estimates import WorkerTraits
from cluster.latency.latency_model import LatencyModel
from tests.engine_runs import build_runner
from tests.observers import SeenSteps
from tests.prompt_budget import prompt_budget
from tests.tiny_models import tiny_model

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
class Learned:
    """What is left of a profile.

    Attributes:
        samples: those that the engine learned from.
        sizes: number of tokens of every forward.
    """

    samples: list[StepSample]
    report: StepCostReport
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
    engine, seen = AsyncEngine(runner, LIMITS), SeenSteps()  # type: ignore[arg-type]
    engine.subscribe(seen)
    for module in ("baton.engine.engine", "baton.engine.step.step_meter", "baton.engine.profile"):
        monkeypatch.setattr(f"{module}.time", runner)
    engine.start()
    try:
        await profile_steps(engine, LIMITS.max_model_len)
        report = (await engine.stats()).step_costs
    finally:
        await engine.stop()
    return Learned(seen.samples, report, runner.sizes)


def assert_no_cost_of_seconds(learned: Learned) -> None:
    router = LatencyModel()
    router.add_worker("w", WorkerTraits(("prefill", "cuda"), LIMITS.chunk_tokens))
    router.update_worker("w", learned.report)
    costs = learned.report.costs
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


async def test_compilations_on_a_gpu_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_no_cost_of_seconds(await profile(monkeypatch, compiles=True))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
async def test_the_first_run_is_not_learned_from(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    assert_no_cost_of_seconds(await profile(monkeypatch, device_type, held_up=frozenset({0})))


@pytest.mark.parametrize("index", [20, 27])
async def test_a_delayed_step_is_not_learned_from(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    assert_no_cost_of_seconds(await profile(monkeypatch, held_up=frozenset({index})))


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

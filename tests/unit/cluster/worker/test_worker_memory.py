"""A worker's cache is sized by its largest steps, run over a small cache, on a device whose memory is made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.core.memory_budget import MemoryBudget
from baton.engine.attention.key_sharing import UNDIVIDED
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.batch.batch import ForwardBatch
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from cluster.config.config import BatonConfig
from cluster.registry.workers import WorkerInfo
from cluster.worker.worker_memory import limit_memory, plan_memory
from tests.tiny_models import tiny_model
from tests.worker_infos import make_info

MIB = 2**20
ENGINE = {"decoder": "transformers", "block_size": 4}
POOLS = {"chunk_tokens": 40, "max_num_seqs": 8}


class FakeMemory:
    """Implements :class:`baton.engine.runner.device_memory.DeviceMemory`: every step has the same peak.

    Args:
        others: bytes that other processes hold.
    """

    def __init__(self, total: int = 64 * MIB, weights: int = 20 * MIB, step: int = 8 * MIB, others: int = 0) -> None:
        self._total, self._weights, self._step, self._others = total, weights, step, others
        self.limits: list[int] = []

    def total_and_free(self) -> tuple[int, int]:
        return self._total, self._total - self._weights - self._others

    def allocated(self) -> int:
        return self._weights

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return self._weights + self._step

    def release(self) -> None: ...

    def limit(self, num_bytes: int) -> None:
        self.limits.append(num_bytes)


@pytest.fixture(autouse=True)
def _small_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("baton.engine.runner.device_memory", "cluster.worker.worker_memory"):
        monkeypatch.setattr(f"{module}.CONTEXT_BYTES", MIB)
    monkeypatch.setattr("baton.engine.runner.device_memory.BYTES_PER_GRAPH", 1000)
    monkeypatch.setattr("baton.engine.runner.device_memory.SIDE_WORKSPACE_BYTES", MIB)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return prepare_model(tiny_model("llama"), "float32")


def configured(gpus: float = 1.0, **changes: Any) -> BatonConfig:
    pool = {**POOLS, "resources": {"gpus": gpus}}
    values: dict[str, Any] = {"engine": dict(ENGINE), "prefill": dict(pool), "decode": dict(pool)}
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return BatonConfig.from_dict(values)


def plan(config: BatonConfig, loaded: LoadedModel, memory: FakeMemory | None, pool: str = "decode") -> MemoryBudget:
    return plan_memory(config, pool, loaded, None, loaded.kv_spec(4), memory)


def test_the_cache_gets_the_memory_left_by_weights_context_and_largest_step(llama: LoadedModel) -> None:
    budget = plan(configured(), llama, FakeMemory())
    left = 0.9 * 64 * MIB - 20 * MIB - 8 * MIB - MIB
    assert (budget.total, budget.activations, budget.graphs, budget.context) == (64 * MIB, 8 * MIB, 0, MIB)
    assert abs(left - budget.kv) < 64 * 1024  # the small cache, which is gone, is no weight
    assert budget.weights <= 20 * MIB


def test_two_workers_with_half_a_gpu_fit(llama: LoadedModel) -> None:
    config = configured(gpus=0.5)
    first = plan(config, llama, FakeMemory(weights=10 * MIB))
    taken = first.weights + first.activations + first.context + first.kv
    second = plan(config, llama, FakeMemory(weights=10 * MIB, others=taken))
    assert first == second
    assert 2 * taken <= 0.9 * 64 * MIB
    memory = FakeMemory()
    limit_memory(config, "decode", memory)
    assert memory.limits == [32 * MIB - MIB]
    limit_memory(configured(gpus=1.0), "decode", memory)
    assert len(memory.limits) == 1


def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Sequences, tokens and rows of logits of each forward."""
    steps = []
    forward = ModelRunner.forward

    def recorded(self: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
        steps.append((len(batch.sequences), batch.num_tokens, batch.num_rows))
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", recorded)
    return steps


def test_the_largest_steps_are_run(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = record_steps(monkeypatch)
    plan(configured(), llama, FakeMemory())
    # A chunk at the end of the longest prompt; all sequences with their drafts, 40 // 8 for each; and a chunk whose
    # tokens all get log probabilities.
    assert steps == [(1, 40, 1), (8, 48, 48), (1, 40, 40)]


def test_a_worker_that_can_change_pools_reserves_memory_for_both(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = record_steps(monkeypatch)
    plan(configured(prefill={"chunk_tokens": 64}), llama, FakeMemory(), "decode")
    assert steps.pop(0) == (1, 64, 1)
    steps.clear()
    plan(configured(prefill={"chunk_tokens": 64, "kv_blocks": 9}), llama, FakeMemory(), "prefill")
    assert steps == [(1, 64, 1), (8, 8, 8), (1, 64, 64)]  # it never verifies drafts


def test_graph_memory_depends_on_the_vocabulary(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchSDPA, "key_sharing", UNDIVIDED)
    small = plan(configured(), llama, FakeMemory(total=2048 * MIB))
    large = plan(configured(), replace(llama, vocab_size=256_000), FakeMemory(total=2048 * MIB))
    assert small.graphs > 8 * MIB  # the activations of a step that is recorded
    assert large.graphs - small.graphs == 8 * (1 + 16) * (256_000 - llama.vocab_size) * 4
    assert plan(configured(engine={"cuda_graphs": "off"}), llama, FakeMemory(total=2048 * MIB)).graphs == 0


def test_configured_cache_sizes_are_used_and_checked(llama: LoadedModel) -> None:
    assert plan(configured(decode={"kv_blocks": 77}), llama, FakeMemory()).kv_blocks == 77
    gib = plan(configured(decode={"kv_memory_gib": 0.004}), llama, FakeMemory())
    assert abs(gib.kv - 0.004 * 2**30) < 64 * 1024
    with pytest.raises(ConfigError, match="Lower kv_blocks or kv_memory_gib"):
        plan(configured(decode={"kv_memory_gib": 1.0}), llama, FakeMemory())


def test_other_processes_on_the_gpu_are_counted(llama: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"Other processes hold about 0\.01 GiB"):
        plan(configured(), llama, FakeMemory(others=12 * MIB))


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            ConfigError,
            r"a step of 40 prompt tokens or 8 sequences .* Lower chunk_tokens",
        ),
        (torch.AcceleratorError("an illegal memory access"), torch.AcceleratorError, "illegal"),
        (ValueError("no such mask"), UnsupportedModelError, "LlamaForCausalLM fails with the paged cache: ValueError"),
    ],
)
def test_a_failing_step_gives_advice(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, failure: Exception, kind: type[Exception], message: str
) -> None:
    def forward(self: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
        raise failure

    monkeypatch.setattr(ModelRunner, "forward", forward)
    with pytest.raises(kind, match=message):
        plan(configured(), llama, FakeMemory())


def test_a_cpu_takes_one_gib_or_the_configured_size(llama: LoadedModel) -> None:
    budget = plan(configured(), llama, None)
    assert 2**30 - 64 * 1024 < budget.kv <= 2**30
    assert budget.total == 0
    assert budget.weights >= sum(parameter.nbytes for parameter in llama.model.parameters()) / 2
    assert plan(configured(decode={"kv_blocks": 5}), llama, None).kv_blocks == 5
    with pytest.raises(ConfigError, match="hold 0 KV blocks of 4 tokens"):
        plan(configured(decode={"kv_memory_gib": 1e-9}), llama, None)


def test_a_memory_budget_round_trips_through_registration() -> None:
    info = make_info("w", "decode", memory={"weights": 1, "kv": 2, "kv_blocks": 3, "total": 4})
    assert info.memory == MemoryBudget(weights=1, kv=2, kv_blocks=3, total=4)
    assert WorkerInfo.from_dict(info.to_dict()) == info

"""The KV cache gets what a worker's share of a GPU leaves, and what cannot fit is refused with the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import ConfigError
from baton.core.memory_budget import DeviceMemoryUse, MemoryBudget, divide_memory

GIB = 2**30
BLOCK_BYTES = 2 * 2**20
H100 = DeviceMemoryUse(
    total=80 * GIB, free=63 * GIB, context=GIB // 2, weights=16 * GIB, activations=2 * GIB, graphs=GIB
)


def test_a_whole_gpu_is_used_up_to_the_configured_utilization() -> None:
    budget = divide_memory(H100, 0.9, 1.0, BLOCK_BYTES)
    spent = budget.context + budget.weights + budget.activations + budget.graphs + budget.kv
    assert 0 <= 0.9 * 80 * GIB - spent < BLOCK_BYTES
    assert budget.kv == budget.kv_blocks * BLOCK_BYTES


def test_two_half_workers_fit_in_either_order() -> None:
    first = divide_memory(H100, 0.9, 0.5, BLOCK_BYTES)
    taken = first.context + first.weights + first.activations + first.graphs + first.kv
    second = divide_memory(replace(H100, free=H100.free - taken), 0.9, 0.5, BLOCK_BYTES)
    assert first == second
    assert 2 * taken <= 0.9 * 80 * GIB


def test_an_8b_model_on_a_24_gb_card_leaves_room_for_kv() -> None:
    use = DeviceMemoryUse(
        total=24 * GIB, free=7 * GIB, context=GIB // 2, weights=15 * GIB, activations=2 * GIB, graphs=GIB
    )
    budget = divide_memory(use, 0.9, 1.0, BLOCK_BYTES)
    assert 3 * GIB < budget.kv < 3.2 * GIB  # 21.6 - 18.5


def test_a_card_that_is_too_small_is_refused_with_advice() -> None:
    use = replace(H100, total=16 * GIB, free=GIB // 4)
    with pytest.raises(ConfigError) as caught:
        divide_memory(use, 0.9, 1.0, BLOCK_BYTES)
    message = caught.value.message
    assert "may use 14.40 GiB: engine.gpu_memory_utilization 0.9 of 16.00 GiB" in message
    assert "weights of 16.00 GiB" in message
    assert "0.25 GiB of the GPU are free" in message
    assert "Lower chunk_tokens or max_num_seqs" in message
    assert "engine.weights: fp8" in message


def test_other_processes_that_use_too_much_memory_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        divide_memory(replace(H100, free=20 * GIB), 0.9, 1.0, BLOCK_BYTES)
    message = caught.value.message
    assert "The GPU has 80.00 GiB, of which 20.00 GiB are free" in message
    assert "needs 55.50 GiB more" in message
    assert "Other processes hold about 43.50 GiB" in message
    assert "lower engine.gpu_memory_utilization" in message


def test_a_configured_cache_can_exceed_the_utilization_but_not_the_share() -> None:
    blocks = 29 * GIB // BLOCK_BYTES
    assert divide_memory(H100, 0.5, 0.7, BLOCK_BYTES, blocks).kv_blocks == blocks
    with pytest.raises(ConfigError, match=r"may use 40\.00 GiB: all of it.* kv_blocks or kv_memory_gib"):
        divide_memory(H100, 0.5, 0.5, BLOCK_BYTES, blocks)
    with pytest.raises(ConfigError, match="lower kv_blocks or kv_memory_gib"):
        divide_memory(replace(H100, free=30 * GIB), 0.9, 1.0, BLOCK_BYTES, blocks)


def test_a_budget_is_described_in_one_line() -> None:
    text = divide_memory(H100, 0.9, 0.5, BLOCK_BYTES).describe()
    assert text == (
        "total 80.00 GiB x utilization 0.9 x share 0.5 = 36.00 GiB: weights 16.00 GiB, activations 2.00 GiB, "
        "graphs 1.00 GiB, context 0.50 GiB, KV 16.50 GiB (8448 blocks)"
    )
    assert MemoryBudget(weights=GIB, kv=GIB, kv_blocks=7).describe() == "weights 1.00 GiB, KV 1.00 GiB (7 blocks)"

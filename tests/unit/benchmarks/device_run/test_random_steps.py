"""Plans of random steps: every sequence has the blocks that it needs, and no two sequences write to one block."""

from __future__ import annotations

import pytest

from benchmarks.device_run.random_steps import blocks_needed, random_plan
from benchmarks.device_run.steps_part import Sizes
from benchmarks.engine_steps import Case

BLOCK_SIZE = 16
H100_BLOCKS = 25_000
"""About as many as fit beside a model in the shape of Llama-3.1-8B."""


@pytest.mark.parametrize("case", [*Sizes().cases, Case(1, 16, 0), Case(4, 9, 15)], ids=lambda case: case.name)
def test_sequences_share_only_blocks_that_they_read(case: Case) -> None:
    plan = random_plan(case, H100_BLOCKS, BLOCK_SIZE, vocab_size=128_256)
    assert len(plan) == case.batch
    written: list[int] = []
    for sequence in plan:
        blocks, start = sequence.request.block_ids, sequence.request.num_computed_tokens
        assert len(set(blocks)) == len(blocks) == -(-(case.context + case.tokens) // BLOCK_SIZE)
        assert 0 <= min(blocks) <= max(blocks) < H100_BLOCKS
        assert (start, sequence.num_new_tokens) == (case.context, case.tokens)
        assert sequence.request.num_tokens >= start + sequence.num_tokens
        written += blocks[start // BLOCK_SIZE :]
    assert len(set(written)) == len(written)
    if blocks_needed(case, BLOCK_SIZE) <= H100_BLOCKS:
        assert len({block for sequence in plan for block in sequence.request.block_ids}) == blocks_needed(
            case, BLOCK_SIZE
        )

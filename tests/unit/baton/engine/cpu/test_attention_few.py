"""Attention of few rows by the matrix unit: right, and to the bit what the same rows get among many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from baton.engine.batch.attention_groups import Span
from baton.engine.cpu.attention import attend, join_splits, max_rows, scratch_floats
from baton.engine.cpu.attention_plan import AttentionPlan
from baton.engine.cpu.emitter import lanes
from baton.engine.cpu.tables import Item
from baton.engine.cpu.tiles import TILE, configure_tiles, has_tiles, release_tiles, tile_configurations
from baton.engine.kv_cache import kv_int8

KIND = np.uint16(0)
SCALING = np.float32(0.125)
NUM_BLOCKS = 48
pytestmark = pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit")


@njit(error_model="numpy")
def _run(configuration, spans, items, joins, shape, queries, keys, values, out, scratch):
    configure_tiles(configuration)
    for item in items:
        attend(KIND, spans[item[0]], item, shape, SCALING, queries, keys, values, out, scratch)
    for item in joins:
        join_splits(KIND, spans[item[0]], item, shape, SCALING, out)
    release_tiles()


class Cache:
    """Keys and values of one layer, of random numbers; what no slot of a sequence holds is NaN."""

    def __init__(self, num_kv_heads: int, dim: int, block_size: int, *, int8: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS * block_size, num_kv_heads, dim)
        self.block_size, self.int8 = block_size, int8
        self.exact = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
        self.blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.rows = [kv_int8.encode_rows(tensor) if int8 else tensor.clone() for tensor in self.exact]
        if int8:
            self.exact = [kv_int8.decode_rows(rows, torch.bfloat16) for rows in self.rows]

    def slots(self, first: int, end: int) -> torch.Tensor:
        places = torch.arange(first, end)
        return torch.tensor(self.blocks)[places // self.block_size] * self.block_size + places % self.block_size

    def poison(self, first: int, end: int) -> None:
        """Nothing may read outside of these positions, or from other sequences."""
        seen = torch.zeros(len(self.rows[0]), dtype=torch.bool)
        seen[self.slots(first, end)] = True
        for rows in self.rows:
            if self.int8:
                kv_int8.scales_of_rows(rows)[~seen] = torch.nan
            else:
                rows[~seen] = torch.nan

    def attend(self, queries: torch.Tensor, length: int, first_key: int, num_threads: int) -> torch.Tensor:
        """Queries ``[kv_heads, tokens, share, dim]``, those of the last tokens → ``[tokens, heads, dim]``."""
        num_kv_heads, num_tokens, share, dim = queries.shape
        blocks = self.blocks[: -(-length // self.block_size)]
        span = Span(blocks, length - num_tokens, num_tokens, first_key=first_key)
        configuration = tile_configurations()
        address = configuration.ctypes.data
        plan = AttentionPlan(num_kv_heads * share, num_kv_heads, dim, max_rows(address, dim))
        tables = plan.tables([span], num_threads)
        shape = (num_tokens, num_kv_heads * share, num_kv_heads, dim, self.block_size, lanes(), address, int(self.int8))
        out = torch.full((num_tokens, num_kv_heads * share, dim), torch.nan, dtype=torch.bfloat16)
        scratch = torch.full((scratch_floats(dim) + 64,), torch.nan)
        queries = queries.contiguous()
        _run(
            address, tables.spans, tables.items, tables.joins.reshape(-1, Item.COLUMNS), shape, queries.data_ptr(),
            *(rows.data_ptr() for rows in self.rows), out.data_ptr(), scratch.data_ptr() + -scratch.data_ptr() % 64,
        )  # fmt: skip
        return out

    def expected(self, queries: torch.Tensor, length: int, first_key: int) -> torch.Tensor:
        """In float32, all at once."""
        num_tokens = queries.shape[1]
        keys, values = (tensor[self.slots(0, length)].float().transpose(0, 1)[:, None] for tensor in self.exact)
        scores = queries.float() @ keys.transpose(-1, -2) * float(SCALING)
        places, last = torch.arange(length), torch.arange(length - num_tokens, length)[:, None]
        hidden = (places > last) | (places < first_key)
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        return (weights @ values).permute(1, 0, 2, 3).flatten(1, 2)


@settings(deadline=None, max_examples=60)
@given(
    heads=st.sampled_from([(1, 1), (3, 3), (2, 4), (8, 2), (1, 16), (2, 9)]),
    dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([1, 4, 8, 16, 32]),
    int8=st.booleans(),
    length=st.one_of(st.integers(1, 48), st.sampled_from([63, 64, 65, 255, 256, 257, 300, 511, 512, 700])),
    num_tokens=st.integers(1, 4),
    window=st.sampled_from([None, 1, 15, 100, 290]),
    num_threads=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 1000),
)
def test_few_rows_are_correct_and_bit_identical_to_many(
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    length: int,
    num_tokens: int,
    window: int | None,
    num_threads: int,
    seed: int,
    *,
    int8: bool,
) -> None:
    num_kv_heads, share = heads
    length = min(length, NUM_BLOCKS * block_size)
    num_tokens = max(1, min(num_tokens, length, TILE // share))
    first_key = 0 if window is None else max(0, length - num_tokens - window)
    cache = Cache(num_kv_heads, dim, block_size, int8=int8, seed=seed)
    many = min(length, 2 * TILE)
    queries = torch.randn(num_kv_heads, many, share, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()
    cache.poison(max(0, min(first_key, length - many)), length)
    few = queries[:, many - num_tokens :]
    found = cache.attend(few, length, first_key, num_threads)
    torch.testing.assert_close(found.float(), cache.expected(few, length, first_key), rtol=0.03, atol=0.02)
    if first_key <= length - many:  # a row before a window's first key sees nothing
        assert torch.equal(found, cache.attend(queries, length, first_key, 1)[many - num_tokens :])


def test_small_blocks_are_not_mistaken_for_one_block() -> None:
    cache = Cache(1, 64, 4, int8=False, seed=7)
    ends = [5, 9, 2, 8]  # the 16th slot lies 15 behind the first
    cache.blocks = [*ends, *(block for block in cache.blocks if block not in ends)]
    queries = torch.randn(1, 1, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.testing.assert_close(
        cache.attend(queries, 16, 0, 1).float(), cache.expected(queries, 16, 0), rtol=0.03, atol=0.02
    )

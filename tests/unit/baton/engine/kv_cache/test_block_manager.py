"""Blocks of requests: prefix hits, growth and release."""

from __future__ import annotations

import pytest

from baton.core.errors import OutOfBlocksError
from baton.core.request import Request, SamplingParams
from baton.engine.kv_cache.block_manager import BlockManager

SIZE = 4


def request(name: str, num_tokens: int = 0, tokens: list[int] | None = None) -> Request:
    return Request(name, list(range(num_tokens)) if tokens is None else tokens, SamplingParams())


def compute(blocks: BlockManager, target: Request) -> None:
    """Prefills all of it at once."""
    blocks.grow(target, target.num_tokens)
    blocks.remember(target, target.num_tokens)


def test_a_second_request_shares_full_blocks_and_computes_at_least_one_token() -> None:
    blocks = BlockManager(16, SIZE)
    first = request("first", 3 * SIZE)
    compute(blocks, first)

    same, longer = request("same", 3 * SIZE), request("longer", 3 * SIZE + 1)
    assert blocks.match_prefix(same) == 2 * SIZE, "the last token's logits are needed, so its block is computed"
    assert blocks.match_prefix(longer) == 3 * SIZE
    assert same.block_ids == first.block_ids[:2]
    assert longer.block_ids == first.block_ids
    assert blocks.check([first, same, longer]) == []
    for each in (first, same, longer):
        blocks.free(each)
    assert blocks.check([]) == []
    assert blocks.usage().used == 0


def test_requests_share_blocks_only_with_the_same_salt() -> None:
    blocks = BlockManager(32, SIZE, hash_key=b"secret")
    first = request("first", 3 * SIZE)
    first.cache_salt = "mine"
    compute(blocks, first)
    for salt, cached in (("mine", 2 * SIZE), ("", 0), ("other", 0)):
        again = request(f"again {salt}", 3 * SIZE)
        again.cache_salt = salt
        assert blocks.match_prefix(again) == cached
        compute(blocks, again)
    assert len(blocks.prefix_cache) == 3 * 3


def test_shared_blocks_are_never_written() -> None:
    """New positions always lie in blocks that no other request holds."""
    blocks = BlockManager(16, SIZE)
    first = request("first", 2 * SIZE + 2)
    compute(blocks, first)
    second = request("second", 2 * SIZE + 2)
    computed = blocks.match_prefix(second)
    blocks.grow(second, second.num_tokens)
    written = second.block_ids[computed // SIZE :]
    assert not set(written) & set(first.block_ids)
    assert all(blocks.pool.ref_count(block) == 1 for block in written)


def test_partial_blocks_are_not_cached() -> None:
    blocks = BlockManager(16, SIZE)
    first = request("first", 2 * SIZE)
    blocks.grow(first, first.num_tokens)
    blocks.remember(first, 2 * SIZE - 1)
    assert len(blocks.prefix_cache) == 1
    blocks.remember(first, 2 * SIZE)
    assert len(blocks.prefix_cache) == 2


def test_output_tokens_are_cached_as_well() -> None:
    blocks = BlockManager(16, SIZE)
    first = request("first", SIZE)
    first.output_token_ids = [90, 91, 92, 93]
    compute(blocks, first)
    follow_up = request("follow-up", tokens=[*range(SIZE), 90, 91, 92, 93, 94])
    assert blocks.match_prefix(follow_up) == 2 * SIZE


def test_a_prefix_is_cached_again_after_its_first_block_was_evicted() -> None:
    blocks = BlockManager(8, SIZE)
    first, twin = request("first", 2 * SIZE), request("twin", 2 * SIZE)
    blocks.grow(first, SIZE)
    blocks.remember(first, SIZE)
    blocks.grow(twin, 2 * SIZE)  # computes the same content at the same time, in blocks of its own
    blocks.remember(twin, 2 * SIZE)
    blocks.free(first)
    filler = request("filler", tokens=[77] * SIZE * 6)
    blocks.grow(filler, filler.num_tokens)  # evicts the beginning, which only the first request's block held
    assert blocks.find_prefix(request("late", 2 * SIZE), 2) == []
    blocks.free(filler)

    third = request("third", 2 * SIZE)
    compute(blocks, third)
    assert len(blocks.find_prefix(request("late", 2 * SIZE), 2)) == 2


def test_disabled_prefix_caching_finds_nothing() -> None:
    blocks = BlockManager(16, SIZE, prefix_caching=False)
    first = request("first", 2 * SIZE)
    compute(blocks, first)
    assert blocks.match_prefix(request("second", 3 * SIZE)) == 0
    assert blocks.find_prefix(request("third", 3 * SIZE), 3) == []
    assert len(blocks.prefix_cache) == 0


def test_a_failed_growth_keeps_the_blocks_of_the_request() -> None:
    blocks = BlockManager(2, SIZE)
    first = request("first", 3 * SIZE)
    blocks.grow(first, SIZE)
    had = list(first.block_ids)
    assert not blocks.can_grow(first, 3 * SIZE)
    with pytest.raises(OutOfBlocksError):
        blocks.grow(first, 3 * SIZE)
    assert first.block_ids == had
    assert blocks.check([first]) == []


def test_check_finds_leaks() -> None:
    blocks = BlockManager(4, SIZE)
    lost = request("lost", SIZE)
    blocks.grow(lost, SIZE)
    assert blocks.check([lost]) == []
    assert len(blocks.check([])) == 1

"""Blocks found by content: only true prefixes, even when hashes collide."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.block_hashes import hash_blocks
from baton.engine.kv_cache.prefix_cache import PrefixCache

SIZE = 4
token_lists = st.lists(st.integers(0, 2), max_size=20)


def chain_of(tokens: list[int]) -> list[bytes]:
    return hash_blocks(tokens, SIZE, len(tokens) // SIZE)


def fill(cache: PrefixCache, tokens: list[int], blocks: list[int]) -> None:
    chain = chain_of(tokens)
    for index, block_hash in enumerate(chain):
        parent = chain[index - 1] if index else None
        cache.insert(block_hash, parent, tokens[index * SIZE : (index + 1) * SIZE], blocks[index])


@given(stored=token_lists, wanted=token_lists)
def test_the_longest_common_prefix_of_full_blocks_is_found(stored: list[int], wanted: list[int]) -> None:
    cache = PrefixCache(SIZE)
    blocks = list(range(100, 100 + len(stored) // SIZE))
    fill(cache, stored, blocks)
    common = 0
    while common < min(len(stored), len(wanted)) and stored[common] == wanted[common]:
        common += 1
    assert cache.find(chain_of(wanted), wanted) == blocks[: common // SIZE]


def test_a_forged_collision_is_a_miss() -> None:
    cache = PrefixCache(SIZE)
    (collision,) = chain_of([1, 2, 3, 4])
    cache.insert(collision, None, [5, 6, 7, 8], block=3)
    assert cache.find([collision], [1, 2, 3, 4]) == []
    assert cache.find([collision], [5, 6, 7, 8]) == [3]


def test_a_forged_collision_after_another_prefix_is_a_miss() -> None:
    cache = PrefixCache(SIZE)
    tokens = [1] * SIZE + [2] * SIZE
    first, second = chain_of(tokens)
    cache.insert(first, None, tokens[:SIZE], block=0)
    cache.insert(second, b"another parent..", tokens[SIZE:], block=1)
    assert cache.find([first, second], tokens) == [0]


def test_equal_tokens_after_different_prefixes_are_different_content() -> None:
    assert chain_of([1] * SIZE + [3] * SIZE)[1] != chain_of([2] * SIZE + [3] * SIZE)[1]


def test_insert_keeps_the_first_block_and_forget_allows_another() -> None:
    cache = PrefixCache(SIZE)
    (block_hash,) = chain_of([1] * SIZE)
    assert cache.insert(block_hash, None, [1] * SIZE, block=5)
    assert not cache.insert(block_hash, None, [1] * SIZE, block=6)
    cache.forget(6)
    assert cache.find([block_hash], [1] * SIZE) == [5]
    cache.forget(5)
    assert cache.find([block_hash], [1] * SIZE) == []
    assert len(cache) == 0
    assert cache.insert(block_hash, None, [1] * SIZE, block=6)


@given(tokens=token_lists, num_first=st.integers(0, 5))
def test_hashes_continue_from_earlier_ones(tokens: list[int], num_first: int) -> None:
    num_first = min(num_first, len(tokens) // SIZE)
    first = hash_blocks(tokens, SIZE, num_first)
    rest = tokens[num_first * SIZE :]
    second = hash_blocks(rest, SIZE, len(rest) // SIZE, first[-1] if first else None)
    assert first + second == chain_of(tokens)

"""A prompt's hashes are those of the engine, and are computed once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.core.request import Request, SamplingParams
from baton.engine.kv_cache.block_manager import BlockManager
from cluster.prefix_index import prefix_index as module
from cluster.prefix_index.prefix_index import PromptHasher, prompt_hashes


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_size=st.integers(1, 7),
    salt=st.text(max_size=4),
    key=st.binary(max_size=64),
)
def test_hashes_match_those_of_the_engine(tokens: list[int], block_size: int, salt: str, key: bytes) -> None:
    blocks = BlockManager(64, block_size, hash_key=key)
    request = Request("request", tokens, SamplingParams(), cache_salt=salt)
    blocks.grow(request, len(tokens))
    blocks.remember(request, len(tokens))
    hashes = prompt_hashes(tuple(tokens), block_size, salt=salt, key=key)
    assert list(hashes.blocks) == request.block_hashes
    again = Request("again", tokens, SamplingParams(), cache_salt=salt)
    cached = blocks.match_prefix(again) if tokens else 0
    assert cached == hashes.num_usable * block_size


def test_a_new_prompt_is_hashed_once(monkeypatch) -> None:
    hashed: list[object] = []

    def counting(tokens: tuple[int, ...], block_size: int, **options: Any) -> module.PromptHashes:
        hashed.append(tokens)
        return prompt_hashes(tokens, block_size, **options)

    monkeypatch.setattr(module, "prompt_hashes", counting)
    hasher = PromptHasher(4, kept_tokens=30)
    prompts = [tuple(range(number, number + 10)) for number in range(4)]
    for prompt in prompts[:3]:
        assert hasher.hash(prompt) is hasher.hash(prompt)
    assert len(hashed) == 3
    hasher.hash(prompts[0])  # now the newest
    hasher.hash(prompts[3])
    assert len(hashed) == 4
    hasher.hash(prompts[0])
    assert len(hashed) == 4
    hasher.hash(prompts[1])
    assert len(hashed) == 5


def test_hashes_differ_by_key_and_salt_in_every_block() -> None:
    prompt, seen = tuple(range(8)), set[bytes]()
    for key in (b"", b"a", b"b"):
        for salt in ("", "a", "b"):
            seen.update(prompt_hashes(prompt, 4, salt=salt, key=key).blocks)
    assert len(seen) == 3 * 3 * 2
    assert PromptHasher(4, b"a").hash(prompt, "b").blocks == prompt_hashes(prompt, 4, salt="b", key=b"a").blocks


def test_a_prompt_larger_than_the_memory_is_kept_until_the_next() -> None:
    hasher = PromptHasher(4, kept_tokens=5)
    large, small = tuple(range(100)), tuple(range(4))
    assert hasher.hash(large) is hasher.hash(large)
    hasher.hash(small)
    assert [tokens for tokens, _ in hasher._newest.values()] == [small]


def test_a_forgotten_prompt_leaves_nothing_behind() -> None:
    hasher = PromptHasher(4, kept_tokens=30)
    prompts = [tuple(range(number, number + 10)) for number in range(3)]
    for prompt in prompts:
        hasher.hash(prompt, "salt")
    hasher.forget(prompts[0])  # with another salt
    assert len(hasher._newest) == 3
    for prompt in (*prompts, prompts[0]):
        hasher.forget(prompt, "salt")
    assert not hasher._newest
    for prompt in prompts:  # the room is free again
        hasher.hash(prompt)
    assert len(hasher._newest) == 3

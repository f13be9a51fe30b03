"""KV as bytes: what one cache exports, another imports, wherever its blocks lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache import kv_int8
from baton.engine.kv_cache.paged_cache import PagedKVCache, slots_of

CPU = torch.device("cpu")
LAYERS = (LayerSpec(2, 3, 3), LayerSpec(1, 5, 2), LayerSpec(2, 4, 1))
NUM_BLOCKS = 8
INT8 = KVEncoding.INT8


def build(dtype: str, block_size: int, *, seed: int | None = None) -> PagedKVCache:
    """A cache of zeros, or of random numbers."""
    cache = PagedKVCache(KVCacheSpec("model", dtype, block_size, LAYERS), NUM_BLOCKS, CPU)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*cache.keys, *cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


@given(
    blocks=st.permutations(range(NUM_BLOCKS)),
    block_size=st.integers(1, 5),
    span=st.tuples(st.integers(0, 39), st.integers(1, 40)),
)
def test_slots_are_block_times_block_size_plus_offset(
    blocks: list[int], block_size: int, span: tuple[int, int]
) -> None:
    room = NUM_BLOCKS * block_size
    start = span[0] % room
    end = min(room, start + span[1])
    expected = [blocks[position // block_size] * block_size + position % block_size for position in range(start, end)]
    assert slots_of(blocks, start, end, block_size).tolist() == expected


def test_parts_are_views_of_the_cache_and_adjacent_blocks_are_merged() -> None:
    source, target = build("bfloat16", 4, seed=1), build("bfloat16", 4)
    blocks, layers = [3, 4, 5, 1], range(1, 3)
    pieces, places = source.pieces(blocks, 2, 15, layers), target.pieces(blocks, 2, 15, layers)
    assert pieces is not None
    assert places is not None
    assert len(places) == 2 * 2 * len(layers)  # keys and values, in blocks 3 to 5 and in block 1
    for place, piece in zip(places, pieces, strict=True):
        place[:] = piece
    assert target.export_bytes(blocks, 2, 15, layers) == source.export_bytes(blocks, 2, 15, layers)
    assert not any(target.export_bytes(blocks, 0, 2, layers))
    assert not any(target.export_bytes(blocks, 15, 16, layers))


@settings(deadline=None)
@given(
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    block_size=st.integers(1, 5),
    source_blocks=st.permutations(range(NUM_BLOCKS)),
    target_blocks=st.permutations(range(NUM_BLOCKS)),
    data=st.data(),
)
def test_a_round_trip_copies_only_the_given_positions_and_layers(
    dtype: str, block_size: int, source_blocks: list[int], target_blocks: list[int], data: st.DataObject
) -> None:
    room = NUM_BLOCKS * block_size
    start = data.draw(st.integers(0, room - 1))
    end = data.draw(st.integers(start + 1, room))
    first_layer = data.draw(st.integers(0, len(LAYERS) - 1))
    layers = range(first_layer, data.draw(st.integers(first_layer + 1, len(LAYERS))))
    source, target = build(dtype, block_size, seed=1), build(dtype, block_size)

    exported = source.export_bytes(source_blocks, start, end, layers)
    assert len(exported) == (end - start) * source.spec.layer_bytes_per_token(layers.start, layers.stop)
    pieces = source.pieces(source_blocks, start, end, layers)
    assert pieces is not None
    assert b"".join(pieces) == exported
    target.import_bytes(target_blocks, start, end, layers, memoryview(exported))

    from_slots = slots_of(source_blocks, start, end, block_size)
    to_slots = slots_of(target_blocks, start, end, block_size)
    untouched = torch.ones(room, dtype=torch.bool)
    untouched[to_slots] = False
    for layer in range(len(LAYERS)):
        for there, here in ((source.keys, target.keys), (source.values, target.values)):
            if layer in layers:
                assert torch.equal(here[layer][to_slots], there[layer][from_slots])
                assert not here[layer][untouched].any()
            else:
                assert not here[layer].any()


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_import_accepts_unaligned_bytes(dtype: str, offset: int) -> None:
    source, target = build(dtype, 4, seed=2), build(dtype, 4)
    blocks, layers = [6, 1, 3], range(len(LAYERS))
    exported = source.export_bytes(blocks, 1, 11, layers)
    shifted = memoryview(bytearray(offset) + exported)[offset:]
    target.import_bytes(blocks, 1, 11, layers, shifted)
    assert target.export_bytes(blocks, 1, 11, layers) == exported


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_export_writes_only_to_the_given_memory(dtype: str) -> None:
    source = build(dtype, 4, seed=2)
    blocks, layers = [6, 1, 3], range(len(LAYERS))
    expected = source.export_bytes(blocks, 1, 11, layers)
    room = bytearray(len(expected) + 64)
    into = memoryview(room)[: len(expected)]
    assert source.export_bytes(blocks, 1, 11, layers, into) == expected == into
    assert room[len(expected) :] == bytes(64)
    with pytest.raises(ValueError, match=f"{len(expected)} bytes was expected, got {len(expected) + 64}"):
        source.export_bytes(blocks, 1, 11, layers, memoryview(room))


def test_a_scratch_block_is_additional_to_the_pool() -> None:
    spec = KVCacheSpec("model", "float32", 4, LAYERS)
    assert PagedKVCache(spec, NUM_BLOCKS, CPU).scratch_block is None
    cache = PagedKVCache(spec, NUM_BLOCKS, CPU, scratch=True)
    assert cache.num_blocks == cache.scratch_block == NUM_BLOCKS
    assert {len(tensor) for tensor in (*cache.keys, *cache.values)} == {(NUM_BLOCKS + 1) * 4}


def test_import_accepts_read_only_bytes() -> None:
    source, target = build("bfloat16", 4, seed=3), build("bfloat16", 4)
    exported = bytes(source.export_bytes([2, 5], 0, 8, range(2)))
    target.import_bytes([2, 5], 0, 8, range(2), memoryview(exported))
    assert target.export_bytes([2, 5], 0, 8, range(2)) == exported


@pytest.mark.parametrize("change", [-1, 1])
def test_import_refuses_a_wrong_length(change: int) -> None:
    cache = build("float32", 4)
    size = 8 * cache.spec.bytes_per_token
    with pytest.raises(ValueError, match=f"{size} bytes was expected, got {size + change}"):
        cache.import_bytes([0, 1], 0, 8, range(len(LAYERS)), memoryview(bytearray(size + change)))


def test_write_stores_keys_and_values_at_their_slots() -> None:
    cache = build("float32", 4)
    keys, values = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    slots = slots_of([5, 2], 3, 6, 4)
    cache.write(0, slots, keys, values)
    assert torch.equal(cache.keys[0][slots], keys)
    assert torch.equal(cache.values[0][slots], values)
    assert slots.tolist() == [23, 8, 9]


@settings(deadline=None)
@given(
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    source_blocks=st.permutations(range(NUM_BLOCKS)),
    target_blocks=st.permutations(range(NUM_BLOCKS)),
    span=st.tuples(st.integers(0, 31), st.integers(1, 32)).map(lambda pair: (pair[0], min(32, sum(pair)))),
    layers=st.sampled_from([range(1), range(1, 3), range(3)]),
)
def test_imported_int8_is_rounded_per_vector_and_written_nowhere_else(
    dtype: str, source_blocks: list[int], target_blocks: list[int], span: tuple[int, int], layers: range
) -> None:
    source, target = build(dtype, 4, seed=1), build(dtype, 4)
    exported = source.export_bytes(source_blocks, *span, layers, encoding=INT8)
    size = (span[1] - span[0]) * source.spec.layer_bytes_per_token(layers.start, layers.stop, INT8)
    assert len(exported) == size
    target.import_bytes(target_blocks, *span, layers, memoryview(bytes(exported)), INT8)

    from_slots, to_slots = slots_of(source_blocks, *span, 4), slots_of(target_blocks, *span, 4)
    untouched = torch.ones(NUM_BLOCKS * 4, dtype=torch.bool)
    untouched[to_slots] = False
    for layer in range(len(LAYERS)):
        for there, here in ((source.keys, target.keys), (source.values, target.values)):
            if layer in layers:
                assert torch.equal(here[layer][to_slots], rounded(there[layer][from_slots]))
                assert not here[layer][untouched].any()
            else:
                assert not here[layer].any()


def rounded(vectors: torch.Tensor) -> torch.Tensor:
    """What int8 makes of them, one vector after the other."""
    found = torch.empty_like(vectors)
    for token, head in product(*map(range, vectors.shape[:2])):
        vector = vectors[token, head]
        data = torch.empty(1, len(vector) + 4, dtype=torch.uint8)
        kv_int8.encode(vector[None, None, None], data)
        found[token, head] = kv_int8.decode(data, (1, 1, len(vector)), vector.dtype)
    return found


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_int8_is_exported_to_unaligned_memory(dtype: str) -> None:
    source = build(dtype, 4, seed=2)
    blocks, layers = [6, 1, 3], range(len(LAYERS))
    expected = source.export_bytes(blocks, 1, 11, layers, encoding=INT8)
    room = bytearray(len(expected) + 64)
    into = memoryview(room)[1 : len(expected) + 1]
    assert source.export_bytes(blocks, 1, 11, layers, into, INT8) == expected == into
    assert room[len(expected) + 1 :] == bytes(63)


@pytest.mark.parametrize("change", [-1, 1])
def test_int8_of_a_wrong_length_is_refused(change: int) -> None:
    cache = build("float32", 4)
    size = 8 * cache.spec.layer_bytes_per_token(0, len(LAYERS), INT8)
    with pytest.raises(ValueError, match=f"{size} bytes was expected, got {size + change}"):
        cache.import_bytes([0, 1], 0, 8, range(len(LAYERS)), memoryview(bytearray(size + change)), INT8)


def test_round_trip_encoding_changes_only_the_first_tokens_and_keeps_native_kv() -> None:
    cache, before = build("float32", 4, seed=5), build("float32", 4, seed=5)
    cache.pass_through([2, 5], 7, KVEncoding.NATIVE)
    assert all(torch.equal(*pair) for pair in zip(cache.keys, before.keys, strict=True))
    cache.pass_through([2, 5], 7, INT8)
    changed = slots_of([2, 5], 0, 7, 4)
    expected = before.values[1].clone()
    expected[changed] = rounded(expected[changed])
    assert torch.equal(cache.values[1], expected)


def build_int8(dtype: str = "float32", seed: int | None = None) -> PagedKVCache:
    """A cache of int8 with a draft's layer behind the model's; zeros, or random numbers everywhere."""
    layers = (LayerSpec(2, 8, 8), LayerSpec(1, 4, 12))
    spec = KVCacheSpec("model", dtype, 4, layers, encoding=INT8).with_draft("draft", (LayerSpec(1, 3, 3),))
    cache = PagedKVCache(spec, NUM_BLOCKS, CPU)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        slots = torch.arange(NUM_BLOCKS * 4)
        for index, layer in enumerate(spec.all_layers):
            sizes = ((len(slots), layer.num_kv_heads, dim) for dim in (layer.key_dim, layer.value_dim))
            rows = [torch.randn(size, generator=generator).to(TORCH_DTYPES[dtype]) for size in sizes]
            cache.write(index, slots, *rows)
    return cache


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_an_int8_cache_matches_a_native_cache_after_int8_transfer(dtype: str) -> None:
    cache = build_int8(dtype)
    native = PagedKVCache(replace(cache.spec, encoding=KVEncoding.NATIVE), NUM_BLOCKS, CPU)
    generator = torch.Generator().manual_seed(2)
    blocks = [5, 2, 7]
    slots = slots_of(blocks, 0, 11, 4)
    for index, layer in enumerate(cache.spec.layers):
        sizes = ((11, layer.num_kv_heads, dim) for dim in (layer.key_dim, layer.value_dim))
        rows = [torch.randn(size, generator=generator).to(TORCH_DTYPES[dtype]) for size in sizes]
        for each in (cache, native):
            each.write(index, slots, *rows)
    native.pass_through(blocks, 11, INT8)
    for index in range(len(cache.spec.layers)):
        assert all(map(torch.equal, cache.read(index, slots), native.read(index, slots)))


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_an_int8_cache_is_transferred_and_moved_unchanged(dtype: str) -> None:
    source, target = build_int8(dtype, seed=3), build_int8(dtype)
    blocks, others, layers = [5, 2, 7], [1, 0, 3], range(3)
    exported = source.export_bytes(blocks, 2, 11, layers)
    assert len(exported) == 9 * source.spec.bytes_per_token
    target.import_bytes(others, 2, 11, layers, memoryview(exported))
    there, here = slots_of(blocks, 2, 11, 4), slots_of(others, 2, 11, 4)
    for layer in layers:
        assert all(map(torch.equal, target.read(layer, here), source.read(layer, there)))
    moved = here.flip(0)
    target.move(here.tolist(), moved.tolist())
    for layer in layers:
        assert all(map(torch.equal, target.read(layer, moved), source.read(layer, there)))


def test_vectors_beyond_the_range_of_int8_are_refused() -> None:
    spec = KVCacheSpec("model", "float32", 4, (LayerSpec(2, 6, 6),), encoding=INT8)
    with pytest.raises(UnsupportedModelError, match=r"multiples of 4.*size 6\..*engine\.kv_cache: native"):
        PagedKVCache(spec, NUM_BLOCKS, CPU)

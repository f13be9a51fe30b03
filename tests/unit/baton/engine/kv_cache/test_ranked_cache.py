"""A cache whose heads lie in the tensors of several ranks has the bytes of one that holds them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from baton.core.ranks import share_of
from baton.engine.kv_cache.paged_cache import PagedKVCache, slots_of
from baton.engine.kv_cache.shared_tensors import OpenedTensors, SharedTensors

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 8, 4
SPEC = KVCacheSpec("model", "float32", BLOCK_SIZE, (LayerSpec(4, 8, 12), LayerSpec(2, 8, 8), LayerSpec(1, 16, 8)))
BLOCKS, OTHERS = [5, 2, 7], [1, 0, 3]
COUNT = 11


class Ranked:
    """A cache over ranks, and one with the same content in a single process."""

    def __init__(self, size: int, encoding: KVEncoding = KVEncoding.NATIVE) -> None:
        spec = replace(SPEC, encoding=encoding)
        self.whole = PagedKVCache(spec, NUM_BLOCKS, CPU)
        self.heads = [[share_of(layer.num_kv_heads, rank, size) for rank in range(size)] for layer in spec.layers]
        self.ranks = [self._rank(spec, rank) for rank in range(size)]
        self.moved: list[tuple[Sequence[int], Sequence[int]]] = []
        self.cache = self.ranks[0]
        others = [
            [tensor for pair in zip(rank.keys, rank.values, strict=True) for tensor in pair] for rank in self.ranks[1:]
        ]
        self.cache.add_ranks(spec, self.heads, others, self._move)

    def _rank(self, spec: KVCacheSpec, rank: int) -> PagedKVCache:
        layers = tuple(
            replace(layer, num_kv_heads=len(heads[rank])) for layer, heads in zip(spec.layers, self.heads, strict=True)
        )
        return PagedKVCache(replace(spec, layers=layers), NUM_BLOCKS, CPU)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for rank in self.ranks[1:]:
            rank.move(sources, targets)

    def fill(self) -> None:
        """What attention writes on each rank."""
        generator = torch.Generator().manual_seed(3)
        slots = slots_of(BLOCKS, 0, COUNT, BLOCK_SIZE)
        for index, layer in enumerate(SPEC.layers):
            keys = torch.randn(COUNT, layer.num_kv_heads, layer.key_dim, generator=generator)
            values = torch.randn(COUNT, layer.num_kv_heads, layer.value_dim, generator=generator)
            self.whole.write(index, slots, keys, values)
            for rank, heads in zip(self.ranks, self.heads[index], strict=True):
                own = slice(heads.start, heads.stop)
                rank.write(index, slots, keys[:, own], values[:, own])


SIZES = pytest.mark.parametrize("size", [1, 2, 4])


@SIZES
@pytest.mark.parametrize("wire", KVEncoding)
@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
def test_exported_bytes_are_those_of_one_cache(size: int, wire: KVEncoding, layers: range) -> None:
    ranked = Ranked(size)
    ranked.fill()
    expected = ranked.whole.export_bytes(BLOCKS, 1, COUNT, layers, encoding=wire)
    assert bytes(ranked.cache.export_bytes(BLOCKS, 1, COUNT, layers, encoding=wire)) == bytes(expected)


@SIZES
@pytest.mark.parametrize("wire", KVEncoding)
def test_imported_bytes_reach_every_rank_that_holds_a_head(size: int, wire: KVEncoding) -> None:
    ranked = Ranked(size)
    ranked.fill()
    data = ranked.whole.export_bytes(BLOCKS, 0, COUNT, range(3), encoding=wire)
    for cache in (ranked.whole, ranked.cache):
        cache.import_bytes(OTHERS, 0, COUNT, range(3), memoryview(bytes(data)), wire)
    slots = slots_of(OTHERS, 0, COUNT, BLOCK_SIZE)
    for index in range(3):
        keys, values = ranked.whole.read(index, slots)
        for rank, heads in zip(ranked.ranks, ranked.heads[index], strict=True):
            own = slice(heads.start, heads.stop)
            assert all(map(torch.equal, rank.read(index, slots), (keys[:, own], values[:, own])))


def test_an_int8_cache_is_sent_as_it_is() -> None:
    ranked = Ranked(2, KVEncoding.INT8)
    ranked.fill()
    expected = bytes(ranked.whole.export_bytes(BLOCKS, 0, COUNT, range(3)))
    assert bytes(ranked.cache.export_bytes(BLOCKS, 0, COUNT, range(3))) == expected
    ranked.cache.import_bytes(OTHERS, 0, COUNT, range(3), memoryview(expected))
    assert bytes(ranked.cache.export_bytes(OTHERS, 0, COUNT, range(3))) == expected


def test_tokens_are_moved_on_every_rank() -> None:
    ranked = Ranked(2)
    ranked.fill()
    sources, targets = slots_of(BLOCKS, 3, 7, BLOCK_SIZE).tolist(), slots_of(OTHERS, 0, 4, BLOCK_SIZE).tolist()
    ranked.whole.move(sources, targets)
    ranked.cache.move(sources, targets)
    expected = ranked.whole.export_bytes(OTHERS, 0, 4, range(3))
    assert bytes(ranked.cache.export_bytes(OTHERS, 0, 4, range(3))) == bytes(expected)


def test_there_are_no_contiguous_pieces() -> None:
    assert Ranked(2).cache.pieces(BLOCKS, 0, COUNT, range(3)) is None


def test_a_shared_tensor_has_one_memory() -> None:
    """As if another process opened it."""
    shared = SharedTensors()
    _, tensor = (shared.allocate((count, 2, 4), torch.bfloat16, CPU) for count in (5, 6))
    opened = OpenedTensors().open(shared.address_of(tensor))
    assert (opened.shape, opened.dtype) == (tensor.shape, tensor.dtype)
    tensor[3] = 1.5
    assert torch.equal(opened, tensor)
    opened[5] = -2.0
    assert torch.equal(opened, tensor)


def test_an_empty_tensor_can_be_shared() -> None:
    shared = SharedTensors()
    assert OpenedTensors().open(shared.address_of(shared.allocate((6, 2, 0), torch.float32, CPU))).shape == (6, 2, 0)

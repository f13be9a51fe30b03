"""Ranges of positions are split into parts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from baton.kv_transfer.base import PartHeader, plan_parts

layers = st.lists(
    st.builds(LayerSpec, st.integers(1, 8), st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=6
)
specs = st.builds(
    lambda dtype, chosen: KVCacheSpec("model", dtype, 16, tuple(chosen)),
    st.sampled_from(["float32", "bfloat16"]),
    layers,
)
ranges = st.tuples(st.integers(0, 200), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + pair[1]))
part_sizes = st.one_of(st.integers(1, 5000), st.integers(1, 1_000_000))
encodings = st.sampled_from(KVEncoding)


@given(specs, ranges, part_sizes, encodings)
def test_parts_cover_every_position_of_every_layer_once_and_in_order(
    spec: KVCacheSpec, span: tuple[int, int], part_bytes: int, encoding: KVEncoding
) -> None:
    start, end = span
    due = [start] * len(spec.layers)
    for part in plan_parts(spec, start, end, part_bytes, encoding=encoding):
        assert part.token_count > 0
        assert part.encoding is encoding
        assert 0 <= part.layer_start < part.layer_end <= len(spec.layers)
        for layer in part.layers:
            assert due[layer] == part.token_start
            due[layer] = part.token_end
    assert all(position == end for position in due)


@given(specs, ranges, part_sizes, encodings)
def test_parts_keep_their_size_limit_unless_one_token_of_one_layer_is_larger(
    spec: KVCacheSpec, span: tuple[int, int], part_bytes: int, encoding: KVEncoding
) -> None:
    for part in plan_parts(spec, *span, part_bytes, encoding=encoding):
        indivisible = part.token_count == 1 and len(part.layers) == 1
        assert part.num_bytes(spec) <= part_bytes or indivisible


@given(specs, ranges, part_sizes, encodings)
def test_no_two_adjacent_parts_could_be_merged(
    spec: KVCacheSpec, span: tuple[int, int], part_bytes: int, encoding: KVEncoding
) -> None:
    parts = list(plan_parts(spec, *span, part_bytes, encoding=encoding))
    for first, second in pairwise(parts):
        if first.layers == second.layers and second.token_end < span[1]:
            assert first.token_count == second.token_count
        assert _joined_bytes(spec, first, second, span) > part_bytes


def _joined_bytes(spec: KVCacheSpec, first: PartHeader, second: PartHeader, span: tuple[int, int]) -> float:
    """Bytes of both parts as one, or infinity where they do not make up a rectangle."""
    if first.layers == second.layers:
        # the last part of a layer takes what is left, so that only whole steps count
        whole_step = second.token_count == first.token_count
        return first.num_bytes(spec) + second.num_bytes(spec) if whole_step else float("inf")
    complete = all((part.token_start, part.token_end) == span for part in (first, second))
    return first.num_bytes(spec) + second.num_bytes(spec) if complete else float("inf")


def test_an_empty_range_has_no_parts() -> None:
    spec = KVCacheSpec("model", "float32", 16, (LayerSpec(2, 8, 8),))
    assert list(plan_parts(spec, 5, 5, 100)) == []
    assert list(plan_parts(spec, 7, 5, 100)) == []

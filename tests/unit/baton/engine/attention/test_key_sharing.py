"""How the keys of a batch are divided among programs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.attention.key_sharing import UNDIVIDED, KeySharing
from baton.engine.batch.attention_groups import Span

H200 = KeySharing(min_keys=64, num_pieces=4 * 132 // 8)
spans_of = st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 600)), min_size=1, max_size=40)


def span(num_keys: int, num_tokens: int = 1) -> Span:
    return Span([], num_keys - num_tokens, num_tokens)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param([1024], [16], id="one sequence"),
        pytest.param([95], [1], id="too few keys for two pieces"),
        pytest.param([96], [2], id="just enough"),
        pytest.param([32768], [66], id="no more pieces than keep the device busy"),
        pytest.param([1024] * 80, [1] * 80, id="enough sequences"),
        pytest.param([32768, *[1024] * 63], [23, *[1] * 63], id="one long sequence among short ones"),
        pytest.param([8192] * 4, [17] * 4, id="a few long sequences"),
    ],
)
def test_long_sequences_are_divided_where_programs_would_be_idle(keys: list[int], expected: list[int]) -> None:
    assert H200.counts([span(each) for each in keys]) == expected


def test_prompts_have_programs_enough_without_division() -> None:
    assert H200.counts([span(8192, 8192)]) == [1]
    assert H200.counts([span(32768, 64)]) == [17]


def test_keys_before_the_first_visible_one_do_not_count() -> None:
    assert H200.counts([Span([], 32767, 1, first_key=32700)]) == [1]


@given(spans_of, st.integers(1, 500), st.integers(1, 200))
def test_extra_pieces_and_rows_are_bounded(lengths: list[tuple[int, int]], min_keys: int, num_pieces: int) -> None:
    """A static plan has room for so many, whatever the batch."""
    sharing = KeySharing(min_keys, num_pieces)
    spans = [span(known + new, new) for known, new in lengths]
    counts = sharing.counts(spans)
    max_keys, max_tokens = max(each.end for each in spans), max(each.num_tokens for each in spans)
    extra_rows = sum(each.num_tokens * (count - 1) for each, count in zip(spans, counts, strict=True))
    assert min(counts) >= 1
    assert sum(counts) - len(spans) <= sharing.most_extra_pieces(max_keys)
    assert extra_rows <= sharing.most_extra_rows(max_keys, max_tokens)


@given(spans_of)
def test_pieces_are_of_similar_length(lengths: list[tuple[int, int]]) -> None:
    spans = [span(known + new, new) for known, new in lengths]
    counts = H200.counts(spans)
    lengths_of_pieces = [(each.end / count, count > 1) for each, count in zip(spans, counts, strict=True)]
    shortest = min((length for length, is_divided in lengths_of_pieces if is_divided), default=None)
    assert shortest is None or max(lengths_of_pieces)[0] <= 2 * shortest


def test_undivided_never_divides() -> None:
    assert UNDIVIDED.counts([span(10_000_000)]) == [1]
    assert UNDIVIDED.most_extra_pieces(10_000_000) == 0

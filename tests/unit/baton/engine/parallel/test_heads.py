from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ranks import share_of
from baton.engine.parallel.heads import Heads

SIZES = st.integers(1, 12)


@given(count=st.integers(1, 40), size=SIZES)
def test_shares_are_equal_up_to_one_and_cover_everything(count: int, size: int) -> None:
    shares = [share_of(count, rank, size) for rank in range(size)]
    assert {index for share in shares for index in share} == set(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [share.start for share in shares] == sorted(share.start for share in shares)
    if size <= count:
        assert sum(map(len, shares)) == count


@given(num_kv_heads=st.integers(1, 12), per_kv_head=st.integers(1, 8), size=SIZES)
def test_ranks_hold_whole_heads_with_the_kv_heads_that_they_read(
    num_kv_heads: int, per_kv_head: int, size: int
) -> None:
    heads = Heads(num_kv_heads * per_kv_head, num_kv_heads)
    if not heads.can_split(size):
        return
    own = [heads.of(rank, size) for rank in range(size)]
    assert [head for each in own for head in each] == list(range(heads.num_heads))
    for rank, each in enumerate(own):
        assert each
        kv = heads.kv_of(rank, size)
        assert {head // per_kv_head for head in each} == set(kv)
        assert len(each) % len(kv) == 0


def test_degrees_that_would_cut_a_head_or_leave_a_rank_without_one() -> None:
    default = Heads(9, 3)
    assert [size for size in range(1, 10) if default.can_split(size)] == [1, 2, 3, 9]
    assert [size for size in range(1, 65) if Heads(64, 8).can_split(size)] == [*range(1, 9), 16, 32, 64]

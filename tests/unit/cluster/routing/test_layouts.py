"""During an upgrade there may be two KV layouts: only workers with equal ones form a pair or continue a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.routing_profile import LocalPrefill
from tests.unit.cluster.routing.worlds import REQUEST, choose, decode_worker, prefill_worker

LAYOUTS = st.lists(st.sampled_from(["old", "new"]), min_size=1, max_size=4)


@given(prefill=LAYOUTS, decode=LAYOUTS, local=st.sampled_from(LocalPrefill))
def test_pairs_have_equal_layouts(prefill: list[str], decode: list[str], local: LocalPrefill) -> None:
    sources = {f"prefill-{number}": layout for number, layout in enumerate(prefill)}
    targets = {f"decode-{number}": layout for number, layout in enumerate(decode)}
    decision = choose(
        [prefill_worker(number, layout=layout) for number, layout in enumerate(prefill)],
        [decode_worker(number, layout=layout) for number, layout in enumerate(decode)],
        local_prefill=str(local),
    )
    has_pair = bool(set(prefill) & set(decode))
    assert (decision is None) == (local is LocalPrefill.NEVER and not has_pair)
    if decision is not None and decision.prefill_id is not None:
        assert sources[decision.prefill_id] == targets[decision.decode_id]


@pytest.mark.parametrize(("layout", "expected"), [("old", "decode-0"), ("new", "decode-1"), ("gone", None)])
def test_tokens_are_continued_with_their_own_layout(layout: str, expected: str | None) -> None:
    resumed = replace(REQUEST, is_resumed=True, layout=layout)
    decode = [decode_worker(0, layout="old"), decode_worker(1, layout="new")]
    decision = choose([prefill_worker(layout="new")], decode, resumed)
    assert (decision.decode_id if decision else None) == expected

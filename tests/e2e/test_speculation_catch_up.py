"""A decode pool that speculates after hand-offs from a prefill pool without the draft."""

from __future__ import annotations

import pytest

from tests.e2e.test_speculation import ask, drafted
from tests.running_cluster import RunningCluster

SETTINGS = {
    "dtype": "float32",
    "prefill": {"kv_blocks": 512},
    "decode": {"kv_blocks": 512},
    "speculation": {"draft_on_prefill": False},
}


@pytest.mark.thorough(
    covered_by="tests/integration/test_handoff_drafts.py::test_a_draft_on_one_side_changes_no_token[decode-eagle3]"
)
def test_the_head_catches_up_without_changing_tokens(cluster: RunningCluster) -> None:
    plain, answer = ask(cluster, "none"), ask(cluster, "eagle3")
    assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert drafted(answer)[0] > 0
    cluster.assert_nothing_leaked()

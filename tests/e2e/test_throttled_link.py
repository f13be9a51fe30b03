"""Time to first token does not include the hand-off: shown over a link so slow that it would be plain to see."""

from __future__ import annotations

import pytest

from tests.running_cluster import RunningCluster

BYTES_PER_SECOND = 4_000_000
SETTINGS = {"kv_transfer": {"max_bytes_per_second": BYTES_PER_SECOND}}
KV_BYTES_PER_TOKEN = 23_040


@pytest.mark.thorough(
    covered_by="tests/integration/test_handoff.py::test_the_first_token_does_not_wait_for_the_handoff"
)
def test_the_first_token_does_not_wait_for_the_handoff(cluster: RunningCluster) -> None:
    body = cluster.complete("One more sentence for a long prompt. " * 110, max_tokens=6, ignore_eos=True)
    num_prompt_tokens = body["usage"]["prompt_tokens"]
    assert num_prompt_tokens > 700
    cluster.assert_nothing_leaked()
    timeline = cluster.get(f"/v1/requests/{body['id']}/timeline")
    at_ms = {event["name"]: event["at_ms"] for event in timeline["events"]}
    # The link alone takes this long, apart from the throttle's burst of a tenth of a second.
    link_ms = num_prompt_tokens * KV_BYTES_PER_TOKEN / BYTES_PER_SECOND * 1e3 - 100
    assert at_ms["kv_committed"] - at_ms["transfer_started"] >= link_ms
    assert at_ms["transfer_started"] < at_ms["first_token_sampled"], "the hand-off starts while prefill runs"
    assert at_ms["first_token"] < at_ms["kv_committed"] <= at_ms["decode_started"] < at_ms["second_token"]

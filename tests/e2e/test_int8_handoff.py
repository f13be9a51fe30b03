"""int8 KV with the default model, in transfers or in the cache: almost the same tokens, half of the bytes."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Settings, running_cluster
from tests.e2e.varied_prompts import varied_prompts

NUM_TOKENS = 8
PROMPTS = varied_prompts()[:16]
pytestmark = pytest.mark.thorough(
    covered_by="tests/integration/test_handoff_int8.py::test_tokens_match_a_prompt_that_was_rounded_once"
)
# After a hand-off, the first token is the prefill worker's; the others follow from transferred KV.
LEAST_EQUAL = 0.8


def answers(encoding: str, kv_cache: str = "native") -> tuple[list[list[int]], float, float]:
    """Tokens, and the KV bytes that were transferred and those that were not."""
    settings: Settings = {
        "dtype": "bfloat16",
        "kv_transfer": {"encoding": encoding},
        "engine": {"prefix_caching": False, "kv_cache": kv_cache},
        "speculation": {"draft": "none"},  # whose KV would stay native in a cache of int8
    }
    with running_cluster(settings) as cluster:
        bodies = [cluster.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        cluster.assert_nothing_leaked()
        timeline = cluster.get(f"/v1/requests/{bodies[0]['id']}/timeline")
        assert (timeline["attributes"]["kv_spared_bytes"] > 0) == (encoding == "int8")
        return (
            [body["choices"][0]["token_ids"] for body in bodies],
            cluster.metric("baton_kv_transfer_bytes_total"),
            cluster.metric("baton_kv_transfer_spared_bytes_total"),
        )


@pytest.fixture(scope="module")
def native() -> tuple[list[list[int]], float, float]:
    return answers("native")


def share_of_equal(mine: list[list[int]], theirs: list[list[int]], place: int) -> float:
    """The share of equal tokens at that place."""
    return sum(a[place] == b[place] for a, b in zip(mine, theirs, strict=True)) / len(mine)


def test_int8_in_transit_halves_the_bytes_and_keeps_the_first_token(
    native: tuple[list[list[int]], float, float],
) -> None:
    expected, native_bytes, native_spared = native
    int8, int8_bytes, int8_spared = answers("int8")
    assert native_spared == 0
    assert int8_bytes + int8_spared == native_bytes
    assert int8_bytes / native_bytes == (64 + 4) / 128
    assert share_of_equal(int8, expected, 0) == 1
    assert share_of_equal(int8, expected, 1) >= LEAST_EQUAL
    assert all(len(tokens) == NUM_TOKENS for tokens in int8)


def test_an_int8_cache_halves_the_bytes_and_keeps_most_tokens(native: tuple[list[list[int]], float, float]) -> None:
    expected, native_bytes, _ = native
    int8, int8_bytes, int8_spared = answers("native", "int8")
    assert int8_spared == 0
    assert int8_bytes / native_bytes == (64 + 4) / 128
    assert share_of_equal(int8, expected, 0) >= LEAST_EQUAL
    assert share_of_equal(int8, expected, 1) >= LEAST_EQUAL
    assert all(len(tokens) == NUM_TOKENS for tokens in int8)

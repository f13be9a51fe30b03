"""KV as int8 with the real default model: nearly the tokens of native KV, and half of the bytes."""

from __future__ import annotations

from tests.e2e.conftest import Settings, running_cluster
from tests.e2e.varied_prompts import varied_prompts

NUM_TOKENS = 8
PROMPTS = varied_prompts()[:16]
# A first token is the prefill worker's own; the others follow from KV that has travelled.
LEAST_EQUAL_SECONDS = 0.8


def answers(encoding: str) -> tuple[list[list[int]], float, float]:
    """Tokens, and the KV bytes that travelled and did not."""
    settings: Settings = {
        "dtype": "bfloat16",
        "kv_transfer": {"encoding": encoding},
        "engine": {"prefix_caching": False},
        "speculation": {"method": "none"},
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


def test_int8_gives_nearly_the_same_tokens_for_half_of_the_bytes() -> None:
    native, native_bytes, native_spared = answers("native")
    int8, int8_bytes, int8_spared = answers("int8")
    assert native_spared == 0
    assert int8_bytes + int8_spared == native_bytes
    assert int8_bytes / native_bytes == (64 + 4) / 128
    assert [tokens[0] for tokens in int8] == [tokens[0] for tokens in native]
    num_equal = sum(mine[1] == theirs[1] for mine, theirs in zip(int8, native, strict=True))
    assert num_equal >= LEAST_EQUAL_SECONDS * len(PROMPTS)
    assert all(len(tokens) == NUM_TOKENS for tokens in int8)

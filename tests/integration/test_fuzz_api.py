"""Requests made from the description of the API: no 500, no hang, and answers as described."""

from __future__ import annotations

from tests.fuzz_api import fuzz_simulated


async def test_requests_from_the_description_get_described_answers() -> None:
    counts = await fuzz_simulated(450)
    assert counts.total() > 300
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert counts[f"POST {path} 200"] > 1
        assert counts[f"POST {path} 400"] > 3

"""Records of requests, for tests of their observers."""

from __future__ import annotations

from baton.core.request import SamplingParams
from baton.core.slo import STANDARD, SloClass
from baton.core.timeline import Timeline
from cluster.requests.generation import GenerationRequest
from cluster.requests.request_record import RequestRecord


def make_record(
    num_prompt_tokens: int = 3,
    slo: SloClass = STANDARD,
    *,
    timeline: Timeline | None = None,
    num_output_tokens: int = 0,
    num_cached_tokens: int = 0,
    outcome: str | None = None,
) -> RequestRecord:
    """A record of a request in its first attempt, with its results so far."""
    params = SamplingParams(max_tokens=1000)
    request = GenerationRequest("r", (0,) * num_prompt_tokens, params, timeline or Timeline("r"), slo=slo)
    record = RequestRecord(request, 10.0)
    record.attempt = 1
    record.token_ids = [1] * num_output_tokens
    record.num_cached_tokens = num_cached_tokens
    record.outcome = outcome
    record.was_accepted = True
    return record

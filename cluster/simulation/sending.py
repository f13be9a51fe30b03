"""Sends single requests to a router in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.outcomes import CANCELLED
from baton.core.request import SamplingParams
from baton.core.slo import SloClass
from baton.core.timeline import Event, Timeline
from cluster.dispatch.router import Router
from cluster.requests.generation import GenerationRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request for its client.

    Attributes:
        outcome: a finish reason, or the code of ``error``.
        error: ``None`` if the request finished.
    """

    timeline: Timeline
    outcome: str
    num_tokens: int
    error: BatonError | None = None


async def send(
    router: Router, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, slo: SloClass
) -> Answer:
    """Sends a request. Returns when the answer is complete, or the request was refused or failed."""
    timeline = Timeline(request_id, clock=asyncio.get_running_loop().time)
    timeline.record(Event.RECEIVED)
    timeline.record(Event.TOKENIZED)
    request = GenerationRequest(request_id, tuple(prompt_token_ids), params, timeline, slo=slo)
    outcome, num_tokens = CANCELLED, 0
    try:
        async for chunk in router.generate(request):
            num_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                outcome = str(chunk.finish_reason)
    except BatonError as error:
        return Answer(timeline, error.code, num_tokens, error)
    return Answer(timeline, outcome, num_tokens)

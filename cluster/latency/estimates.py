"""Inputs and answers of the latency model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Estimate(NamedTuple):
    """Milliseconds, and how far a single outcome lies from them (one standard deviation)."""

    ms: float
    sd_ms: float


@dataclass(frozen=True, slots=True)
class WorkerTraits:
    """The traits of a worker that predictions depend on.

    Attributes:
        kind: of its group: workers of one pool, model, dtype, device and number of threads cost about the same.
        chunk_tokens: token budget of one step.
    """

    kind: tuple[str, ...]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """The work in front of a new prompt on a worker.

    Attributes:
        tokens: uncached prompt tokens ahead, those in the step under way included.
        attention_pairs: of these tokens, as in :class:`baton.core.step_samples.StepSample`.
        prompts: how many prompts they belong to.
        elapsed_ms: since the step under way began, as far as one knows.
        decoding: sequences that decode on the worker; each of them takes a token of every step's budget.
        context_tokens: of these sequences together.
        tpot_target_s: the strictest of theirs, to which the worker cuts prompts; 0: none.
    """

    tokens: int = 0
    attention_pairs: int = 0
    prompts: int = 0
    elapsed_ms: float = 0.0
    decoding: int = 0
    context_tokens: int = 0
    tpot_target_s: float = 0.0


EMPTY_QUEUE = PromptQueue()


@dataclass(frozen=True, slots=True)
class RouteForecast:
    """The prediction for a request on its route, with and without calibration; milliseconds.

    Attributes:
        before_ms: of the TTFT: what was over when the request was routed, and its way there and back.
        model_ttft_ms, model_tpot_ms: without calibration and, for the TTFT, without ``before_ms``.
        exposed_ms: of the hand-off, what is left when the prompt is computed; as transfers go, nothing added.
        contended: another worker computes on the same processor.
        local: the decode worker computes the prompt.
    """

    ttft_ms: float
    tpot_ms: float
    before_ms: float
    model_ttft_ms: float
    model_tpot_ms: float
    exposed_ms: float
    contended: bool
    local: bool


UNKNOWN_FORECAST = RouteForecast(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, contended=False, local=False)
"""For a route without a prediction, from which nothing is learned."""

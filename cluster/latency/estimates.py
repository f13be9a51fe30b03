"""Inputs and outputs of the latency model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

USUAL_OUTPUT_TOKENS = 64
"""Tokens of an answer, before the first one has ended. Chosen: a few sentences."""


class Estimate(NamedTuple):
    """Predicted milliseconds, and the standard deviation of a single outcome."""

    ms: float
    sd_ms: float


@dataclass(frozen=True, slots=True)
class WorkerTraits:
    """The traits of a worker that predictions depend on.

    Attributes:
        kind: key of its group. Workers of one pool, model, dtype, device and number of threads have similar costs.
        chunk_tokens: token budget of one step.
    """

    kind: tuple[str, ...]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """The work in front of a new prompt on a worker.

    Attributes:
        tokens: uncached prompt tokens ahead, including those of the step in progress.
        attention_pairs: attention pairs of these tokens, as in :class:`baton.core.step_costs.StepSample`.
        prompts: number of prompts that they belong to.
        elapsed_ms: estimated time since the step in progress began.
        decoding: sequences that decode on the worker. Each takes one token of every step's budget.
        context_tokens: tokens of these sequences together.
        tpot_target_s: their strictest TPOT target, to which the worker adapts prompt chunks; 0 means none.
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
        before_ms: the part of the TTFT before routing, plus the delivery to and from the worker.
        model_ttft_ms, model_tpot_ms: without calibration and, for the TTFT, without ``before_ms``.
        exposed_ms: the part of the KV transfer after the prompt is computed.
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
"""Forecast of a route without a prediction. The model does not learn from it."""

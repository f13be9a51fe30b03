"""What the latency model answers, and the queue that it is told about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Estimate(NamedTuple):
    """Milliseconds, and how far a single outcome lies from them (one standard deviation)."""

    ms: float
    sd_ms: float


@dataclass(frozen=True, slots=True)
class WorkerTraits:
    """What predictions need to know of a worker.

    Attributes:
        kind: of its group: workers of one pool, model, dtype, device and number of threads cost about the same.
        chunk_tokens: token budget of one step.
    """

    kind: tuple[str, ...]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """What a new prompt finds in front of it on a worker.

    Attributes:
        tokens: uncached prompt tokens ahead, those in the step under way included.
        attention_pairs: of these tokens, as in :class:`engine.step_samples.StepSample`.
        prompts: how many prompts they belong to.
        elapsed_ms: since the step under way began, as far as one knows.
        decoding: sequences that decode on the worker; each of them takes a token of every step's budget.
        context_tokens: of these sequences together.
    """

    tokens: int = 0
    attention_pairs: int = 0
    prompts: int = 0
    elapsed_ms: float = 0.0
    decoding: int = 0
    context_tokens: int = 0


EMPTY_QUEUE = PromptQueue()


def attention_pairs(uncached_tokens: int, context_tokens: int) -> int:
    """(token, token before it) pairs of a prompt behind ``context_tokens`` cached ones, however it is chunked."""
    return uncached_tokens * context_tokens + uncached_tokens * (uncached_tokens + 1) // 2

"""Chooses the prompt chunks of a step by the rules of ``Scheduler``, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.core.chunk_budget import PromptAllowance
from baton.engine.scheduling.ordering import OrderingPolicy
from cluster.simulation.sequences import SimulatedSequence

ELDEST_SHARE = 8
"""The prompt that began first keeps 1/8 of the allowance of prompts, as in ``Scheduler``."""


@dataclass(slots=True)
class PromptPlan:
    """The prompt chunks of a step.

    Attributes:
        chunks: prompts in the step, with their numbers of tokens.
        tokens, attention_pairs: totals of all chunks.
    """

    chunks: list[tuple[SimulatedSequence, int]] = field(default_factory=list)
    tokens: int = 0
    attention_pairs: int = 0

    def add(self, sequence: SimulatedSequence, num_tokens: int) -> None:
        start = sequence.request.num_computed_tokens
        self.chunks.append((sequence, num_tokens))
        self.tokens += num_tokens
        self.attention_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2


def plan_prompts(
    computing: Iterable[SimulatedSequence],
    waiting: Iterable[SimulatedSequence],
    allowance: PromptAllowance,
    ordering: OrderingPolicy,
    now_s: float,
    start: Callable[[SimulatedSequence], bool],
) -> PromptPlan:
    """Plans chunks of begun and waiting prompts, the most urgent first.

    A begun prompt gives way to a more urgent one, except for the share of the first begun one. Waiting prompts start
    strictly in order: if one finds no room, no later one starts.

    Args:
        computing: begun prompts, in the order in which they began.
        start: starts a waiting prompt; returns False if it cannot start.
    """
    plan, running = PromptPlan(), list(computing)
    eldest = running[0] if running else None
    kept = allowance.tokens_at(eldest.request.num_computed_tokens) // ELDEST_SHARE if eldest is not None else 0
    has_begun = set(running)
    everybody = [(ordering.key(s.request, now_s), number, s) for number, s in enumerate((*running, *waiting))]
    spent = blocked = False
    for _, _, sequence in sorted(everybody):
        if allowance.tokens < 1:
            break
        if sequence is eldest:
            kept = 0
        at_least = 0
        if sequence not in has_begun:
            blocked = blocked or spent or not start(sequence)
            if blocked:
                continue
            at_least = 1
        first = sequence.request.num_computed_tokens
        num_tokens = min(sequence.remaining, max(at_least, allowance.tokens_at(first) - kept))
        if num_tokens > 0:
            allowance.take(num_tokens, first)
            plan.add(sequence, num_tokens)
        spent = allowance.tokens_at(0) <= kept
    return plan

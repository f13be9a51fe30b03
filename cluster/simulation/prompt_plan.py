"""Which prompts are in a step, and how much of each: the rules of ``Scheduler``, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.core.chunk_budget import PromptAllowance
from baton.engine.scheduling.ordering import OrderingPolicy
from cluster.simulation.sequences import SimulatedSequence

ELDEST_SHARE = 8
"""As in ``scheduler``: the prompt that began first keeps one part in so many of what prompts may take."""


@dataclass(slots=True)
class PromptPlan:
    """
    Attributes:
        chunks: prompts in the step, and how many tokens of each.
        tokens, attention_pairs: of all of them.
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
    """Prompts that have begun and prompts that wait, the most urgent first.

    One that has begun gives way to a more urgent one, but for the share of the first of them. Strictly in order: when
    one finds no room, none behind it starts.

    Args:
        computing: in the order in which they began.
        start: makes a waiting one run; False when it cannot.
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

"""Engine steps as a request records them, and as a health check sees them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PENDING_STEPS = 64
"""Steps without a token (prompt chunks) that a request keeps apart until its next token; further ones merge."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step, shared by all requests in it; or several steps of one request, merged.

    Attributes:
        index: the engine's number of the (last) step.
        started_s, ended_s: monotonic clock of the engine's process.
        busy_s: time spent in the step; merged steps do not count the time between them.
        draft_s: part of ``busy_s`` spent on guessing tokens.
        num_sequences: sequences in the step, this one included.
        num_tokens: rows of the forward, drafts included.
        num_prompt_tokens: rows of prompts and of recomputation after a preemption.
    """

    index: int
    started_s: float
    ended_s: float
    busy_s: float
    draft_s: float
    num_sequences: int
    num_tokens: int
    num_prompt_tokens: int
    num_steps: int = 1

    def merged_with(self, later: EngineStep) -> EngineStep:
        """Merges two steps; sizes are those of the larger one."""
        return EngineStep(
            later.index,
            self.started_s,
            later.ended_s,
            self.busy_s + later.busy_s,
            self.draft_s + later.draft_s,
            max(self.num_sequences, later.num_sequences),
            max(self.num_tokens, later.num_tokens),
            max(self.num_prompt_tokens, later.num_prompt_tokens),
            self.num_steps + later.num_steps,
        )


StepShare = tuple[EngineStep, int]
"""A step, and how many known tokens of the request it computed."""


def add_share(shares: list[StepShare], step: EngineStep, num_tokens: int) -> None:
    """Appends to ``shares``; from ``MAX_PENDING_STEPS`` entries on, merges into the last one."""
    if len(shares) < MAX_PENDING_STEPS:
        shares.append((step, num_tokens))
    else:
        last, num_before = shares[-1]
        shares[-1] = (last.merged_with(step), num_before + num_tokens)


@dataclass(frozen=True, slots=True)
class StepProgress:
    """How far an engine has come.

    Attributes:
        num_steps: steps that have ended, failed ones included.
        step_age_s: time since the running step began; 0 if none is running.
        expected_step_s: how long the model of step costs expects the running step to take.
    """

    num_steps: int
    step_age_s: float = 0.0
    expected_step_s: float = 0.0

"""Rounds of traced requests."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.rounds import Round
from baton.core.steps import EngineStep
from baton.engine.contracts import VerifyResult


def round_of(result: VerifyResult, token_ids: Sequence[int], step: EngineStep) -> Round:
    """The round of one sequence in a step.

    Args:
        token_ids: the tokens of ``result`` that the answer keeps.
    """
    draft = result.sequence.draft
    return Round(
        token_ids=tuple(token_ids),
        method=draft.method,
        draft=draft.token_ids,
        parents=tuple(map(draft.parent, range(len(draft)))),
        accepted=result.nodes,
        draft_s=step.draft_s,
        verify_s=max(0.0, step.busy_s - step.draft_s),
        num_sequences=step.num_sequences,
    )

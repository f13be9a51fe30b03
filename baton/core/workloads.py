"""Kinds of requests by which the acceptance of drafts is measured. No torch here."""

from __future__ import annotations

from enum import StrEnum

from baton.core.request import Request

LONG_PROMPT_TOKENS = 512


class Workload(StrEnum):
    """What drafts of a request have to go by."""

    SHORT_PROMPT = "short_prompt"
    LONG_PROMPT = "long_prompt"
    GRAMMAR = "grammar"


def workload_of(request: Request) -> Workload:
    """A grammar makes answers regular whatever the prompt is. Long prompts have more to repeat."""
    if request.params.grammar:
        return Workload.GRAMMAR
    is_long = len(request.prompt_token_ids) >= LONG_PROMPT_TOKENS
    return Workload.LONG_PROMPT if is_long else Workload.SHORT_PROMPT

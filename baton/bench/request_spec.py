"""What is to be sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request before it is sent.

    Attributes:
        prompt: its text.
        input_tokens: what the prompt shall count; None when nobody knows.
        output_tokens: what the answer shall have.
        at_s: arrival in the trace, in seconds since its beginning; None without one.
        is_clipped: a limit cut prompt or answer.
    """

    prompt: str
    input_tokens: int | None
    output_tokens: int
    at_s: float | None = None
    is_clipped: bool = False

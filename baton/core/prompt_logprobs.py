"""Log probabilities of a prompt's tokens, as arrays: a long prompt has millions of numbers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_SCORED_TOKENS = 128
"""Prompt tokens of one step that may get log probabilities: each needs a row of logits of the whole vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens, under the model's own distribution (before any processing).

    Those of a whole prompt begin with its second token, since nothing comes before the first.

    Attributes:
        logprobs: float32 ``[num_tokens]``, of the tokens themselves.
        ranks: int32 ``[num_tokens]``; 1 is the most likely token, equally likely ones have the same rank.
        top_ids, top_logprobs: int32 and float32 ``[num_tokens, num_top]``, of the most likely tokens, in their order.
    """

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def of_prompt(cls, num_prompt_tokens: int, num_top: int) -> PromptLogprobs:
        """Room for a whole prompt; every number is 0."""
        count = max(0, num_prompt_tokens - 1)
        return cls(
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            np.zeros((count, num_top), np.int32),
            np.zeros((count, num_top), np.float32),
        )

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def num_top(self) -> int:
        return int(self.top_ids.shape[1])

    @property
    def is_valid(self) -> bool:
        """False if logits of the model were not numbers."""
        return not bool(np.isnan(self.logprobs).any())

    def between(self, start: int, end: int) -> PromptLogprobs:
        """A view of the entries ``[start, end)``."""
        return PromptLogprobs(
            self.logprobs[start:end], self.ranks[start:end], self.top_ids[start:end], self.top_logprobs[start:end]
        )

    def put(self, start: int, part: PromptLogprobs) -> None:
        """Copies ``part`` to the entries from ``start`` on."""
        end = start + len(part)
        self.logprobs[start:end] = part.logprobs
        self.ranks[start:end] = part.ranks
        self.top_ids[start:end] = part.top_ids
        self.top_logprobs[start:end] = part.top_logprobs

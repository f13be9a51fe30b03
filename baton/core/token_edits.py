"""What a request's parameters do to single tokens, in the form that every step needs. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class TokenEdits:
    """Built once per request, since a client may name every token of the vocabulary.

    Attributes:
        stop_ids: tokens that end the output.
        held_back_ids: int64, tokens that are excluded until there are ``min_tokens``.
        bias_ids: int64, tokens whose logits change by ``biases``.
        biases: float32, as many.
    """

    stop_ids: frozenset[int]
    held_back_ids: npt.NDArray[np.int64]
    bias_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]

    @classmethod
    def of(cls, stop_ids: Collection[int], logit_bias: Sequence[tuple[int, float]], *, holds_back: bool) -> TokenEdits:
        """Args:
        holds_back: whether a least number of tokens is asked for.
        """
        tokens, biases = zip(*logit_bias, strict=True) if logit_bias else ((), ())
        return cls(
            frozenset(stop_ids),
            np.array(sorted(stop_ids) if holds_back else (), dtype=np.int64),
            np.array(tokens, dtype=np.int64),
            np.array(biases, dtype=np.float32),
        )

"""Fake tokens: cheap, and equal for equal requests."""

from __future__ import annotations

from math import exp
from random import Random
from zlib import crc32

from baton.core.request import SamplingParams

_TABLE_TOKENS = 4096
_FIRST_WORD = 512
"""First id in use, since vocabularies begin with special tokens and single bytes."""
_LAST_WORD = 20_000
_LENGTH_SD = 0.7


class FakeTokens:
    """The output of simulated workers. A sequence that resumes on another worker continues unchanged.

    Args:
        vocab_size: upper bound of the ids.
        end_token: id that ends an answer by itself; ``None`` means that answers only end by length.
        median_tokens: median length of answers that may end by themselves.
    """

    def __init__(self, vocab_size: int, end_token: int | None, median_tokens: int) -> None:
        first = min(_FIRST_WORD, vocab_size // 2)
        last = min(_LAST_WORD, vocab_size)
        table = Random(vocab_size).choices(range(first, last), k=_TABLE_TOKENS)
        self._table = [token for token in table if token != end_token] or [first]
        self._end_token = end_token
        self._median_tokens = median_tokens

    def stop_length(self, params: SamplingParams, num_prompt_tokens: int) -> int | None:
        """Number of tokens after which an answer ends by itself; ``None`` if it ends at ``max_tokens``."""
        if params.ignore_eos or self._end_token is None:
            return None
        length = self._median_tokens * exp(Random(f"{params.seed}:{num_prompt_tokens}").gauss(0.0, _LENGTH_SD))
        stop = max(1, params.min_tokens, round(length))
        return stop if stop <= params.max_tokens else None

    def between(self, params: SamplingParams, start: int, end: int, stop: int | None) -> list[int]:
        """Tokens at the output positions ``[start, end)``. The token at position ``stop - 1`` is the end token."""
        table = self._table
        offset = (crc32(params.seed.to_bytes(8, "little")) + start) % len(table)
        count = end - start
        tokens = table[offset : offset + count]
        while len(tokens) < count:
            tokens += table[: count - len(tokens)]
        if end == stop and tokens and self._end_token is not None:
            tokens[-1] = self._end_token
        return tokens

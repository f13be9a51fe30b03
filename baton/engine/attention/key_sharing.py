"""Divides the keys of long sequences into pieces, which different programs of an attention kernel read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.batch.attention_groups import Span

_TOKENS_PER_TILE = 16
"""New tokens that one program computes: 64 rows with four heads to a KV head."""


@dataclass(frozen=True, slots=True)
class KeySharing:
    """How the keys of a batch are divided: in proportion, so that no piece is much longer than the others.

    A batch with one long sequence among short ones takes as long as its longest piece.

    Attributes:
        min_keys: a piece has at least three quarters as many keys.
        num_pieces: how many pieces keep the device busy, with a program for each KV head of a piece.
    """

    min_keys: int
    num_pieces: int

    def counts(self, spans: Sequence[Span]) -> list[int]:
        """The number of pieces of each sequence; in all, less than ``num_pieces`` more than there are sequences."""
        keys = [span.end - span.first_key for span in spans]
        tiles = [max(1, -(-span.num_tokens // _TOKENS_PER_TILE)) for span in spans]
        work = sum(each * count for each, count in zip(keys, tiles, strict=True))
        size = max(self.min_keys, -(-work // self.num_pieces))
        return [-(-each // size) if 2 * each >= 3 * size else 1 for each in keys]

    def most_extra_pieces(self, max_keys: int) -> int:
        """The most pieces beyond one of each sequence, in a batch whose sequences have up to ``max_keys`` keys."""
        return self.num_pieces if 2 * max_keys >= 3 * self.min_keys else 0

    def most_extra_rows(self, max_keys: int, max_tokens: int) -> int:
        """The most rows of these pieces, which have a row for each of up to ``max_tokens`` new tokens."""
        return self.most_extra_pieces(max_keys) * min(max_tokens, _TOKENS_PER_TILE)


UNDIVIDED = KeySharing(min_keys=2**31, num_pieces=1)

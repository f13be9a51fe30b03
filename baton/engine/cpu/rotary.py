"""Table of cosines and sines of positions, computed by the model's own module."""

from __future__ import annotations

import torch

from baton.core.errors import NotFusableError
from baton.engine.cpu.structure import Rotary

_FIRST_SIZE = 2048


class RotaryTable:
    """Cosines and sines by position; grows on demand.

    Args:
        rotary: the model's rotary function; see :class:`baton.engine.cpu.structure.Decoder`.
    """

    def __init__(self, rotary: Rotary, head_dim: int) -> None:
        self._rotary = rotary
        self._half = head_dim // 2
        self._cos = torch.empty(0, self._half)
        self._sin = torch.empty(0, self._half)
        self._grow(_FIRST_SIZE)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines, float32 ``[num_tokens, head_dim / 2]`` each."""
        highest = int(positions.max())
        if highest >= self._cos.shape[0]:
            self._grow(max(highest + 1, 2 * self._cos.shape[0]))
        return self._cos[positions], self._sin[positions]

    def _grow(self, size: int) -> None:
        with torch.inference_mode():
            tables = self._rotary(torch.zeros(1, dtype=torch.float32), torch.arange(size)[None])
        halves = []
        for table in tables:
            if tuple(table.shape) != (1, size, 2 * self._half):
                raise NotFusableError(f"rotary tables have the shape {tuple(table.shape)}")
            low, high = table[0].float().chunk(2, dim=-1)
            if not torch.equal(low, high):
                raise NotFusableError("rotary embedding pairs neighbouring dimensions")
            halves.append(low.contiguous())
        self._cos, self._sin = halves

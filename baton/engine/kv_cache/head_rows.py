"""The keys, or the values, of one layer of a cache whose heads may lie in several tensors, those of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class HeadRows:
    """A row for each slot: the vectors of all heads.

    Attributes:
        num_heads: heads of a row.
        dim: numbers of a vector, in the cache's encoding.
        parts: the heads that each tensor ``[num_slots, len(heads), dim]`` holds. Several may hold the same ones.
        sources: parts that together hold each head once.
    """

    num_heads: int
    dim: int
    parts: tuple[tuple[range, torch.Tensor], ...]
    sources: tuple[tuple[range, torch.Tensor], ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HeadRows:
        """All heads in one tensor."""
        _, num_heads, dim = tensor.shape
        parts = ((range(num_heads), tensor),)
        return cls(num_heads, dim, parts, parts)

    @property
    def whole(self) -> torch.Tensor | None:
        """The only tensor, which holds all heads; ``None`` if there are several."""
        return self.parts[0][1] if len(self.parts) == 1 else None

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][1].dtype

    def read_into(self, out: torch.Tensor, slots: torch.Tensor) -> None:
        """Copies the rows of ``slots`` into ``out``, ``[len(slots), num_heads, dim]``."""
        if (tensor := self.whole) is not None:
            torch.index_select(tensor, 0, slots, out=out)
            return
        for heads, tensor in self.sources:
            out[:, heads.start : heads.stop].copy_(tensor.index_select(0, slots.to(tensor.device)))

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies ``rows``, ``[len(slots), num_heads, dim]``, to ``slots``."""
        for heads, tensor in self.parts:
            own = rows[:, heads.start : heads.stop]
            tensor.index_copy_(0, slots.to(tensor.device), own.to(tensor.device))
            if tensor.device != rows.device:  # what waits for the stream of the rows waits for this too
                done = torch.cuda.current_stream(tensor.device).record_event()
                torch.cuda.current_stream(rows.device).wait_event(done)

    def write_bytes(self, slots: torch.Tensor, data: npt.NDArray[np.uint8]) -> None:
        """Like :meth:`write` on a CPU, from bytes at any address."""
        if (tensor := self.whole) is None:
            rows = torch.from_numpy(data.copy()).view(self.dtype)
            self.write(slots, rows.view(len(slots), self.num_heads, self.dim))
            return
        # Whole rows; torch's index_copy_ copies element by element and takes three times as long.
        row = np.dtype((np.void, tensor[0].nbytes))
        stored = tensor.view(torch.uint8).view(len(tensor), row.itemsize).numpy().view(row)
        stored[slots.numpy(), 0] = data.view(row)


def join_rows(ranks: Sequence[torch.Tensor], heads: Sequence[range], num_heads: int) -> HeadRows:
    """The rows of several ranks.

    Args:
        ranks: each rank's tensor.
        heads: the heads that each holds.
        num_heads: heads of the whole layer.
    """
    parts = tuple(zip(heads, ranks, strict=True))
    sources = {held.start: (held, tensor) for held, tensor in reversed(parts)}
    return HeadRows(num_heads, ranks[0].shape[2], parts, tuple(sources.values()))

"""The part of a divided tensor that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from baton.engine.parallel.group import RankGroup

_NO_BITS = 0


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Which part of a tensor this rank holds.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension that is divided.
        ranges: the indices held, in the order in which they are stored.
    """

    shape: torch.Size
    dim: int
    ranges: tuple[range, ...]


def held_part(tensor: DTensor, group: RankGroup) -> HeldPart | None:
    """The part of a tensor that transformers divided; ``None`` if every rank holds it whole."""
    placement = tensor.placements[0]
    if placement.is_replicate():
        return None
    dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]  # all other placements have one
    pieces = getattr(placement, "split_factor", 1)
    size = tensor.shape[dim] // pieces
    each = -(-size // group.size)
    start, stop = min(group.rank * each, size), min((group.rank + 1) * each, size)
    return HeldPart(
        tensor.shape, dim, tuple(range(piece * size + start, piece * size + stop) for piece in range(pieces))
    )


def sample(tensor: torch.Tensor, step: int, group: RankGroup | None) -> torch.Tensor:
    """Every ``step``-th number of a tensor, float32; of all ranks together if it is divided.

    Args:
        tensor: on this rank's device. All ranks call this together for a ``DTensor``.
    """
    part = held_part(tensor, group) if isinstance(tensor, DTensor) and group is not None else None
    if part is None or group is None:
        whole = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return whole.flatten()[::step].float().cpu()
    local = tensor.to_local()  # type: ignore[attr-defined]
    places = torch.arange(0, part.shape.numel(), step)
    behind = part.shape[part.dim + 1 :].numel()
    along = places // behind % part.shape[part.dim]  # index in the divided dimension
    bits = torch.full(places.shape, _NO_BITS, dtype=torch.int32)
    first = 0
    for held in part.ranges:
        mine = (along >= held.start) & (along < held.stop)
        before = places[mine] // (behind * part.shape[part.dim])
        row = before * local.shape[part.dim] + first + along[mine] - held.start
        numbers = local.flatten()[(row * behind + places[mine] % behind).to(local.device)]
        bits[mine] = numbers.float().cpu().view(torch.int32)
        first += len(held)
    # As integers, since the sum of -0.0 and 0.0 is another number than -0.0.
    return group.all_reduce(bits.to(local.device)).cpu().view(torch.float32)

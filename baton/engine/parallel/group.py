"""The ranks of one model, and what they exchange while they compute it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

_LOOPBACK = "127.0.0.1"


class RankGroup:
    """A process's place among the ranks of a model. All ranks must call the same methods in the same order.

    Args:
        rank: this process, in ``[0, size)``; rank 0 leads.
        size: number of ranks.

    Raises:
        RuntimeError: of every method, when a rank has ended or does not take part in time.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Replaces each rank's tensor by the sum of all ranks', and returns it."""
        partial = partial.contiguous()
        dist.all_reduce(partial)
        return partial

    def gather_columns(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Returns the columns of all ranks, side by side.

        Args:
            columns: this rank's, ``[..., widths[rank]]``.
            widths: number of columns of each rank.

        Returns:
            ``[..., sum(widths)]``
        """
        widest = max(widths)
        if widths[self.rank] < widest:
            columns = torch.nn.functional.pad(columns, (0, widest - widths[self.rank]))
        parts = [columns.new_empty(columns.shape) for _ in range(self.size)]
        dist.all_gather(parts, columns.contiguous())
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor of each rank by rank 0's."""
        dist.broadcast(tensor, 0)

    def least(self, number: int, device: torch.device) -> int:
        """Returns the smallest of the ranks' numbers."""
        found = torch.tensor(number, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def leave(self) -> None:
        """Ends the group in this process."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(rank: int, size: int, store: dist.Store, device: torch.device, timeout_s: float) -> RankGroup:
    """Joins the ranks of one model, which is the only model of this process.

    Args:
        store: shared by the ranks; see :func:`host_store` and :func:`reach_store`.
        device: NCCL connects ranks on GPUs, gloo all others.
        timeout_s: how long an exchange waits for a rank.

    Raises:
        RuntimeError: the others cannot be reached.
    """
    os.environ["LOCAL_RANK"] = str(rank)  # transformers takes the GPU of that number
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return RankGroup(rank, size)


def host_store(size: int, timeout_s: float) -> dist.TCPStore:
    """Opens the store through which ranks of this machine find each other, at a free port of the loopback address."""
    return dist.TCPStore(
        _LOOPBACK, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def reach_store(port: int, size: int, timeout_s: float) -> dist.TCPStore:
    """Connects to the store of :func:`host_store`."""
    return dist.TCPStore(_LOOPBACK, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))

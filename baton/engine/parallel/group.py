"""The ranks of one model, and what they exchange while they compute it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LOOPBACK = "127.0.0.1"
EXCHANGE_TIMEOUT_S = 600.0
"""How long ranks wait for one another. They read different amounts of weights, and compile at different times."""


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

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Returns the parts of all ranks, one after the other along ``dim``.

        Args:
            part: this rank's, of size ``sizes[rank]`` along ``dim``; all other sizes are equal on all ranks.
            sizes: those of all ranks.
        """
        own, largest = sizes[self.rank], max(sizes)
        if own < largest:
            padding = list(part.shape)
            padding[dim] = largest - own
            part = torch.cat((part, part.new_empty(padding)), dim)
        parts = [part.new_empty(part.shape) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat([each.narrow(dim, 0, size) for each, size in zip(parts, sizes, strict=True)], dim)

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


def join_ranks(rank: int, size: int, store: TCPStore, device: torch.device, timeout_s: float) -> RankGroup:
    """Joins the ranks of one model, which is the only model of this process.

    Args:
        store: shared by the ranks; see :func:`host_store` and :func:`reach_store`.
        device: NCCL connects ranks on GPUs, gloo all others.
        timeout_s: how long an exchange waits for a rank.

    Raises:
        RuntimeError: the others cannot be reached.
    """
    store.set(_joins(rank), "")
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


def host_store(size: int, timeout_s: float) -> TCPStore:
    """Opens the store through which ranks of this machine find each other, at a free port of the loopback address."""
    with socket.create_server((_LOOPBACK, 0)) as listener:  # torch's own would accept from all networks
        port = listener.getsockname()[1]
        return TCPStore(
            _LOOPBACK,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def reach_store(port: int, size: int, timeout_s: float) -> TCPStore:
    """Connects to the store of :func:`host_store`."""
    return TCPStore(_LOOPBACK, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))


def has_joined(store: TCPStore, size: int) -> bool:
    """Whether all ranks but the first have called :func:`join_ranks`."""
    return bool(store.check([_joins(rank) for rank in range(1, size)]))


def _joins(rank: int) -> str:
    return f"rank {rank} joins"

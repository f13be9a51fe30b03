"""Tensors of one process that another one reads and writes: the cache of a follower, for its rank 0."""

from __future__ import annotations

import math
import mmap
import os
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import reduce_tensor

Address: TypeAlias = tuple[Any, ...]
"""What another process needs to open a tensor; pickle knows it."""

_MEMORY_NAME = "baton-rank-kv"


class SharedTensors:
    """Allocates tensors whose memory other processes of this user can open while this process runs."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # by address

    def allocate(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns zeros; their memory has no name, so it ends with the processes that use it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not num_bytes:
            return torch.zeros(shape, dtype=dtype, device=device)
        descriptor = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        tensor = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=dtype).view(shape)
        self._files[tensor.data_ptr()] = descriptor
        return tensor

    def address_of(self, tensor: torch.Tensor) -> Address:
        """The address of a tensor that :meth:`allocate` returned."""
        descriptor = self._files.get(tensor.data_ptr())
        if descriptor is None:
            if tensor.is_cuda:
                return ("cuda", *reduce_tensor(tensor))  # type: ignore[no-untyped-call]
            return ("empty", tuple(tensor.shape), tensor.dtype)
        return ("cpu", os.getpid(), descriptor, tuple(tensor.shape), tensor.dtype)


def open_tensor(address: Address) -> torch.Tensor:
    """The tensor behind an address of :meth:`SharedTensors.address_of`, which lives in another process.

    Raises:
        OSError: that process has ended, or belongs to another user.
    """
    kind, *rest = address
    if kind == "cuda":
        rebuild, arguments = rest
        opened: torch.Tensor = rebuild(*arguments)
        return opened
    if kind == "empty":
        shape, dtype = rest
        return torch.empty(shape, dtype=dtype)
    pid, descriptor, shape, dtype = rest
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=dtype).view(shape)

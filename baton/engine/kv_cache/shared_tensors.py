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
_ALIGNMENT = 64


class SharedTensors:
    """Allocates tensors whose memory other processes of this user can open while this process runs.

    On a CPU they lie in one file without a name, as large as the machine's memory, of which the system provides the
    pages that are used. It ends with the processes that use it.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._memory: mmap.mmap | None = None
        self._offset = 0
        self._places: dict[int, int] = {}  # offset of each tensor, by address

    def allocate(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not num_bytes:
            return torch.zeros(shape, dtype=dtype, device=device)
        if self._memory is None:
            size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
            self._descriptor = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, size)
            self._memory = mmap.mmap(self._descriptor, size)
        tensor = _tensor_at(self._memory, self._offset, shape, dtype)
        self._places[tensor.data_ptr()] = self._offset
        self._offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor

    def address_of(self, tensor: torch.Tensor) -> Address:
        """The address of a tensor that :meth:`allocate` returned."""
        if tensor.is_cuda:
            return ("cuda", *reduce_tensor(tensor))  # type: ignore[no-untyped-call]
        shape = tuple(tensor.shape)
        if not tensor.numel():
            return ("empty", shape, tensor.dtype)
        return ("cpu", os.getpid(), self._descriptor, self._places[tensor.data_ptr()], shape, tensor.dtype)


class OpenedTensors:
    """Opens tensors of other processes."""

    def __init__(self) -> None:
        self._memories: dict[tuple[int, int], mmap.mmap] = {}

    def open(self, address: Address) -> torch.Tensor:
        """The tensor behind an address of :meth:`SharedTensors.address_of`.

        Raises:
            OSError: its process has ended, or belongs to another user.
        """
        kind, *rest = address
        if kind == "cuda":
            rebuild, arguments = rest
            opened: torch.Tensor = rebuild(*arguments)
            return opened
        if kind == "empty":
            shape, dtype = rest
            return torch.empty(shape, dtype=dtype)
        pid, descriptor, offset, shape, dtype = rest
        if (pid, descriptor) not in self._memories:
            with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
                self._memories[pid, descriptor] = mmap.mmap(file.fileno(), 0)
        return _tensor_at(self._memories[pid, descriptor], offset, shape, dtype)


def _tensor_at(memory: mmap.mmap, offset: int, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

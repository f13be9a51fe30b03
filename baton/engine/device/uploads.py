"""Copies small tables from the host to the device without waiting for it.

A copy from pageable memory makes the host wait until the device has done all earlier work. A copy from pinned memory is
queued like a kernel, and torch's pinned allocator does not reuse the memory before the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor on ``device``; on the CPU they share their memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns int64 ``[len(values)]`` on ``device``."""
    return upload(np.array(values, dtype=np.int64), device)


def upload_numbers(data: bytes, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers from their bytes, ``[count]``. Raises ValueError for any other number of bytes."""
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes were received, expected {count} numbers of {dtype.itemsize} bytes")
    return upload(np.frombuffer(bytearray(data), dtype=np.uint8), device).view(dtype)


def take_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """``tensor[rows]`` without the wait that a device would cause for a list in pageable memory.

    Returns:
        ``[len(rows), ...]``: a view of ``tensor`` where the rows are consecutive, else a copy.
    """
    first = rows[0] if rows else 0
    if list(rows) == list(range(first, first + len(rows))):
        return tensor[first : first + len(rows)]
    return tensor.index_select(0, upload_ints(rows, tensor.device))


def upload_into(target: torch.Tensor, array: npt.NDArray[np.generic]) -> None:
    """Overwrites a tensor of the array's shape and dtype, which keeps its address."""
    source = torch.from_numpy(array)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

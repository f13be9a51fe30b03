"""Copies results from the device to the host without waiting for later work.

A plain copy to the host waits for everything queued on its stream, including a step that was launched ahead.
"""

from __future__ import annotations

from typing import Any

import torch


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


class Download:
    """A copy of a small tensor to the host, in flight.

    Args:
        tensor: must not be written again; on the CPU it is read in place.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._arrived = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        """The tensor on the host. Waits for the copy, and so for all work queued before it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.cpu()


def fetch(*tensors: torch.Tensor) -> list[Any]:
    """``[tensor.tolist() for tensor in tensors]`` with one copy and one wait for tensors on a device.

    Args:
        tensors: tensors on one device. They are copied as float64, which represents floats and integers up to 2**53
            exactly.
    """
    if is_on_host(tensors[0]):
        return [tensor.tolist() for tensor in tensors]
    packed = Download(torch.cat([tensor.double().flatten() for tensor in tensors])).read()
    parts = torch.split(packed, [tensor.numel() for tensor in tensors])
    return [part.to(own.dtype).view(own.shape).tolist() for part, own in zip(parts, tensors, strict=True)]

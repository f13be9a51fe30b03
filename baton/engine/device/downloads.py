"""Results from the device to the host without waiting for what is queued behind them.

A plain copy to the host waits for everything that its stream was given, a step that was launched ahead included.
"""

from __future__ import annotations

from typing import Any

import torch


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a look at its values waits for no device."""
    return tensor.device.type == "cpu"


class Download:
    """A small tensor on its way to the host.

    Args:
        tensor: is not written again; on the CPU it is read where it lies.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._arrived = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        """The tensor on the host. Waits for it, and so for all that was queued before it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.cpu()


def fetch(*tensors: torch.Tensor) -> list[Any]:
    """``[tensor.tolist() for tensor in tensors]`` with one copy and one wait where they lie on a device.

    Args:
        tensors: on one device. They travel as float64, which keeps floats and integers up to 2**53 as they are.
    """
    if is_on_host(tensors[0]):
        return [tensor.tolist() for tensor in tensors]
    packed = Download(torch.cat([tensor.double().flatten() for tensor in tensors])).read()
    parts = torch.split(packed, [tensor.numel() for tensor in tensors])
    return [part.to(own.dtype).view(own.shape).tolist() for part, own in zip(parts, tensors, strict=True)]

"""Results from the device to the host without waiting for what is queued behind them.

A plain copy to the host waits for everything that its stream was given, a step that was launched ahead included.
"""

from __future__ import annotations

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
        """Waits for it, and so for all that was queued before it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host

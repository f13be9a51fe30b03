"""Classifies exceptions of the device: out of memory, lost for this process, or neither.

A kernel that faults (an illegal address, a failed device-side assert, an uncorrectable memory error) destroys the
process's CUDA context. From then on every call fails at once. A worker that continued would fail requests faster than
healthy workers serve them and attract all of them. Only a new process helps.
"""

from __future__ import annotations

import re

import torch

from baton.core.no_memory import says_no_memory

_CUDA_OUT_OF_MEMORY = 2
_HARMLESS_CUDA_CODES = frozenset({1, 9, 98, 209, 400, 701, 800, 801, *range(900, 909)})
"""Invalid value, configuration, device function, kernel image or handle, too many resources for a launch, unpermitted
or unsupported operations, and failed captures: the driver refuses the call and the context stays intact."""

_LOST_TEXT = re.compile(
    r"NCCL|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)|illegal memory access|misaligned address"
    r"|illegal instruction|unspecified launch failure|device-side assert|[Uu]ncorrectable"
)
_PROBE_SIZE = 16


class DeviceLostError(Exception):
    """The device, or another rank, no longer computes for this process; the process must be replaced."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host lacked memory for an allocation.

    The device's context is intact, and a smaller step may succeed.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError) and _code_of(error) == _CUDA_OUT_OF_MEMORY:
        return True
    return says_no_memory(error)


def is_device_lost(error: BaseException) -> bool:
    """Whether the error itself shows that the device is lost.

    Some errors do not show it, so also call :func:`check_device`.
    """
    if isinstance(error, DeviceLostError):
        return True
    if is_out_of_memory(error):
        return False
    if isinstance(error, getattr(torch.distributed, "DistError", ())):  # some builds of torch have no such module
        return True
    if isinstance(error, torch.AcceleratorError):
        return _code_of(error) not in _HARMLESS_CUDA_CODES
    return isinstance(error, RuntimeError) and _LOST_TEXT.search(str(error)) is not None


def check_device(device: torch.device) -> None:
    """Computes a small product and waits for everything on a CUDA device; does nothing on other devices.

    Raises:
        Exception: the error of the device. A lost device fails every call.
    """
    if device.type != "cuda":
        return
    ones = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device)
    (ones @ ones).sum().item()
    torch.cuda.synchronize(device)


def free_cached_memory(device: torch.device) -> None:
    """Returns memory that torch keeps for later allocations to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _code_of(error: torch.AcceleratorError) -> int | None:
    return getattr(error, "error_code", None)

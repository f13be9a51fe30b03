"""Finds the operations that make the host wait for its device, on a machine without a device.

A device lags behind the host. Some operations stop the host until the device has caught up: reading a number, making a
tensor whose shape depends on values, copying to the host, and copying from pageable memory. Each of them costs a part
of the step, and none of them can be captured in a CUDA graph.

:class:`DeviceWaits` records such operations, with the calling line, on one of two fake devices:

``cpu``   All CPU tensors count as the device's. Values are real, so that code continues after a wait. Copies between
          host and device are not found.
``meta``  Tensors of the meta device count as the device's, CPU tensors as the host's. Copies are found. Every number
          that the host reads is 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ROOT = Path(__file__).resolve().parent.parent
_VALUES = {"_local_scalar_dense", "equal", "allclose", "is_nonzero"}
_SHAPES = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
_INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_", "_unsafe_index_put"}
_NO_CALLERS = (__file__, "/site-packages/torch/", str(_ROOT / "baton/engine/device/downloads.py"))
_FACTORIES = {"tensor", "as_tensor", "asarray", "new_tensor"}


class Kind(Enum):
    """Why the host waits; a queued upload is recorded, but the host does not wait for it."""

    VALUE = "reads a number"
    SHAPE = "has a shape that depends on values"
    DOWNLOAD = "copies to the host"
    UPLOAD = "copies out of pageable memory"
    QUEUED_UPLOAD = "is copied from the host by baton.engine.device.uploads"


@dataclass(frozen=True, slots=True)
class Wait:
    """A recorded wait.

    Attributes:
        place: file and function, such as ``baton/engine/sampling/sampler.py:read``; other files without folders.
        line: line in the file.
    """

    kind: Kind
    operation: str
    place: str
    line: int

    def __str__(self) -> str:
        return f"{self.place} (line {self.line}): {self.operation} {self.kind.value}"


class DeviceWaits:
    """A context in which waits are recorded.

    Args:
        device: ``cpu`` or ``meta``; see the module's docstring.

    Attributes:
        found: the recorded operations in order.
    """

    def __init__(self, device: str = "meta") -> None:
        self.device = device
        self.found: list[Wait] = []
        self._stack = ExitStack()

    def __enter__(self) -> DeviceWaits:
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def waits(self) -> list[Wait]:
        """The found operations that make the host wait."""
        return [wait for wait in self.found if wait.kind is not Kind.QUEUED_UPLOAD]

    @property
    def places(self) -> Counter[str]:
        """How often the host waits, by place."""
        return Counter(wait.place for wait in self.waits)

    def watch(self, run: Callable[[], Any]) -> list[Wait]:
        """The waits of ``run``, which may fail after a wait on the meta device, because its values are fake."""
        self.found.clear()
        with self:
            try:
                run()
            except Exception:
                if self.device == "cpu" or not self.waits:
                    raise
        return list(self.found)

    def __str__(self) -> str:
        return "\n".join(map(str, self.waits))

    def note(self, kind: Kind, operation: str) -> None:
        path, function, line = _caller()
        if kind is Kind.UPLOAD and path == "baton/engine/device/uploads.py":
            kind = Kind.QUEUED_UPLOAD
        self.found.append(Wait(kind, operation, f"{path}:{function}", line))

    def has(self, value: Any) -> bool:
        """Whether the value is a tensor on the device."""
        return isinstance(value, torch.Tensor) and value.device.type == self.device


def sets_number_by_mask(func: Any, args: Any) -> bool:
    """Whether the call is ``tensor[mask] = number``, which only CUDA executes like :func:`fill_by_mask`."""
    return func is torch.Tensor.__setitem__ and isinstance(args[2], int | float | bool) and _has_mask([args[1]])


def fill_by_mask(tensor: torch.Tensor, mask: torch.Tensor, number: float) -> None:
    """Executes ``tensor[mask] = number`` without counting the set elements, for which the host would wait."""
    inner = tensor.dim() - mask.dim()
    tensor.masked_fill_(mask[(..., *[None] * inner)].bool(), number)


class _Calls(TorchFunctionMode):
    """Finds conversions of Python lists to tensors, which the meta device hides from dispatch."""

    def __init__(self, waits: DeviceWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waits, num_found = self._waits, len(self._waits.found)
        sees_uploads = waits.device == "meta"
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and sees_uploads and waits.has(args[0]):
            if any(isinstance(part, list) for part in _parts(args[1])):
                waits.note(Kind.UPLOAD, "an index that is a list")
            elif _sets_one_element(func, args):
                waits.note(Kind.UPLOAD, "a number set as one element")
        elif getattr(func, "__name__", "") in _FACTORIES and sees_uploads:
            result = func(*args, **kwargs)
            if waits.has(result) and not waits.has(args[-1] if args else None) and len(waits.found) == num_found:
                waits.note(Kind.UPLOAD, func.__name__)
            return result
        return fill_by_mask(*args) if sets_number_by_mask(func, args) else func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, waits: DeviceWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operations arrive undecomposed
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func.overloadpacket.__name__
        waits, tensors = self._waits, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs)
        if not any(map(waits.has, tensors)):
            return func(*args, **kwargs)
        if name in _VALUES:
            waits.note(Kind.VALUE, name)
            return _ONES.get(args[0].dtype, 1) if waits.device == "meta" else func(*args, **kwargs)
        if name in _SHAPES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            waits.note(Kind.SHAPE, name)
        elif name in _INDEXED and _has_mask(args[1]):
            waits.note(Kind.SHAPE, f"{name} with a mask")
        elif name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            # On GPUs other than those of compute capability 9.0 and 10.0, bfloat16 waits too.
            waits.note(Kind.DOWNLOAD, "_grouped_mm, for the sizes of its groups, in another dtype than bfloat16,")
        elif any(tensor.dim() and not waits.has(tensor) for tensor in tensors):
            waits.note(Kind.UPLOAD, f"{name} of a tensor of the host's")
        return func(*args, **kwargs)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Handles a copy within the device, or between device and host."""
        waits = self._waits
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device.type if name == "copy_" else torch.device(kwargs.get("device") or source.device).type
        if waits.has(source) and target != waits.device:
            waits.note(Kind.DOWNLOAD, name)
            if name == "copy_":
                return args[0].fill_(1)
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if not waits.has(source) and target == waits.device:
            waits.note(Kind.UPLOAD, name)
        return func(*args, **kwargs)


_ONES: dict[torch.dtype, Any] = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0, torch.bfloat16: 1.0}


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _has_mask(parts: Any) -> bool:
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _sets_one_element(func: Any, args: Any) -> bool:
    """Whether the call sets one element, which CUDA does by a copy; several elements are filled."""
    if func is not torch.Tensor.__setitem__ or isinstance(args[2], torch.Tensor):
        return False
    parts = _parts(args[1])
    return len(parts) == args[0].dim() and all(isinstance(part, int) for part in parts)


def _caller() -> tuple[str, str, int]:
    """File, function and line of the innermost frame that requested the operation."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _NO_CALLERS):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(_ROOT) and "site-packages" not in path.parts:
        name = str(path.relative_to(_ROOT))
    else:
        name = str(path).rpartition("/site-packages/")[2]
    return name, frame.f_code.co_name, frame.f_lineno

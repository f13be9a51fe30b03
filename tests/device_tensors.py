"""Tensors of a fake device. They claim to be CUDA's; each holds a CPU tensor, on which operations are computed when
:mod:`tests.stream_checker` schedules them.

Modelled:

* every operation that torch dispatches for such a tensor, from any caller (models, sampling, drafts, the cache), as
  one operation of the caller's current stream; and recordings of operations, like CUDA graphs;
* copies between host and device: from and to pinned memory (read and written when scheduled), from pageable memory
  (read at once) and to it (waited for), and values that the host reads (waited for);
* both allocators: memory is overwritten as soon as torch may give it to another owner. On the device this is an
  operation of the stream that it was allocated for; pinned memory is overwritten by the host;
* streams and events, see :mod:`tests.fake_cuda`; the attention kernel, see :mod:`tests.kernel_attention`.

Not modelled: Triton's kernels themselves; the order of the host's reads and writes of pinned memory relative to the
device's, which act on the content at that moment; the order between threads of the host, which count as one, so that a
wait by one of them counts for all; reuse within a graph's memory pool.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.stream_checker import Access, Device, Memory, Rows

CUDA = torch.device("cuda", 0)
_POISON = 0xFF  # not a number, -1, or true
_LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount")
"""Operations for which the host waits, because their shape or result depends on values."""
_INDEXED = ("index_select", "index_copy_", "index_copy", "index_add_", "index_fill_")


class DeviceTensor(torch.Tensor):
    """A tensor of the fake device.

    Attributes:
        values: the device's values so far.
    """

    values: torch.Tensor
    handle: Handle

    @staticmethod
    def __new__(cls, values: torch.Tensor, handle: Handle) -> DeviceTensor:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        with torch.inference_mode(False):  # views of tensors from outside must not be inference tensors
            made = torch.Tensor._make_wrapper_subclass(cls, values.shape, **layout, dtype=values.dtype, device="cpu")
        made.values, made.handle = values, handle
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        self.handle.memory.users.add(stream.number)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = _tensors_in((args, kwargs))[0]
        return tensor.handle.tensors.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = _tensors_in((args, kwargs))[0]
        return tensor.handle.tensors.dispatch(func, args, kwargs or {})


class Handle:
    """An allocation, which its tensors share; it is freed with the last of them."""

    def __init__(self, tensors: DeviceTensors, values: torch.Tensor, row_bytes: int) -> None:
        self.tensors = tensors
        storage = values.untyped_storage()
        self.memory = Memory(storage.nbytes(), row_bytes)
        self.stream = tensors.device.current
        weakref.finalize(
            self, tensors.device.free, self.memory, self.stream, lambda: storage.fill_(_POISON), pinned=False
        )


class _PinnedArray(np.ndarray):  # type: ignore[type-arg]
    """The host's view of pinned memory, with which the memory is freed, even while the device uses it."""


class DeviceTensors:
    """Creates the tensors of a device and executes operations on them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pinned: dict[int, tuple[torch.Tensor, Memory]] = {}  # by address

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handles a call of a torch function; functions that name devices never reach :meth:`dispatch`."""
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self.pinned(args[0].nbytes).view(args[0].dtype).view(args[0].shape).copy_(args[0])
        if kwargs.get("pin_memory"):
            shape = torch.Size(args[0] if isinstance(args[0], Sequence) else args)
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self.pinned(shape.numel() * dtype.itemsize).view(dtype).view(shape)
        if name in ("to", "cpu", "cuda"):
            return self._to(func, name, args, kwargs)
        if isinstance(args[0] if args else None, DeviceTensor) and name in ("tolist", "numpy", "__array__"):
            if name != "tolist":
                raise TypeError("can't convert cuda:0 device type tensor to numpy.")
            return self.on_host(args[0]).tolist()
        target = kwargs.get("device")
        with torch._C.DisableTorchFunction():
            if target is None or torch.device(target).type != "cuda":
                return func(*args, **kwargs)
            made = func(*values_of(args), **{**values_of(kwargs), "device": "cpu"})
            if name.startswith("empty"):
                return self._allocate(made)
            return self.upload(made, non_blocking=name not in ("tensor", "as_tensor", "asarray"))

    def _to(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensor, *others = args
        if name == "to" and isinstance(kwargs.get("other", others and others[0]), torch.Tensor):
            other = kwargs.pop("other", None) if "other" in kwargs else others.pop(0)
            others = [other.device, other.dtype, *others]
        with torch._C.DisableTorchFunction():
            if name == "to":
                device, dtype, non_blocking, _ = torch._C._nn._parse_to(*others, **kwargs)
            else:
                device, dtype, non_blocking = torch.device(name), None, kwargs.get("non_blocking", False)
            here = tensor.device.type
            there = here if device is None else device.type
            if dtype is not None and dtype != tensor.dtype and (here == "cuda" or there != "cuda"):
                tensor = torch.Tensor.to(tensor, dtype)
            if here == there:
                return tensor
            if there == "cuda":
                tensor = self.upload(tensor, non_blocking=non_blocking)
                return tensor if dtype is None else torch.Tensor.to(tensor, dtype)
            out = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copy(out, tensor, non_blocking=non_blocking)
            return out

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handles a torch operation with at least one tensor of the device."""
        with torch._C.DisableTorchFunction():
            if _is_composite(func):
                return func.decompose(*args, **kwargs)
            name = func.overloadpacket.__name__
            if func.is_view:
                handle = args[0].handle
                return _map(torch.Tensor, lambda t: DeviceTensor(t, handle), func(*values_of(args), **kwargs))
            if name == "copy_":
                return self._copy(args[0], args[1], non_blocking=kwargs.get("non_blocking", len(args) > 2 and args[2]))
            self._refuse_host_tensors(name, args, kwargs)
            if name in _LOOKS or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
                self.device.synchronize(self.device.current)
                found = func(*values_of(args), **values_of(kwargs))
                return _map(torch.Tensor, lambda t: self.upload(t, non_blocking=True), found)
            return self._launch(func, name, args, kwargs)

    def upload(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> DeviceTensor:
        """Copies a tensor to the device."""
        made = self._allocate(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))
        self._copy(made, tensor, non_blocking=non_blocking)
        return made

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the host and waits for the copy."""
        self.device.synchronize(self.device.current)
        return values_of(tensor).clone()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory, uint8 ``[num_bytes]``, with the content that its last owner left."""
        host = np.full(max(1, num_bytes), _POISON, dtype=np.uint8)
        with torch.inference_mode(False):
            block = torch.from_numpy(host)
        array = host.view(_PinnedArray)
        memory = Memory(num_bytes, max(1, num_bytes))
        self._pinned[block.data_ptr()] = (block, memory)

        def given_away() -> None:
            host.fill(_POISON)
            self._pinned.pop(block.data_ptr(), None)

        weakref.finalize(array, self.device.free, memory, 0, given_away, pinned=True)
        return torch.from_numpy(array)[:num_bytes]

    def take_over(self, module: nn.Module) -> None:
        """Moves a module's parameters and buffers to the device."""
        for each in module.modules():
            for tensors in (each._parameters, each._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self.upload(tensor.detach())  # type: ignore[assignment]

    def _refuse_host_tensors(self, name: str, args: Any, kwargs: Any) -> None:
        for tensor in _tensors_in((args, kwargs), torch.Tensor):
            if not tensor.dim() or isinstance(tensor, DeviceTensor):
                continue
            if name not in ("index", "index_put_", "_index_put_impl_"):
                raise RuntimeError(f"{name} is given tensors of the device and of the host")
            self.device.synchronize(self.device.current)  # a list of indices: torch copies it to the device and waits

    def _allocate(self, values: torch.Tensor) -> DeviceTensor:
        values.untyped_storage().fill_(_POISON)
        row = values.stride(0) if values.dim() > 1 else 1
        return DeviceTensor(values, Handle(self, values, row * values.itemsize))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        accesses: list[Access] = []
        sides = []
        waits = not non_blocking and not (target.is_cuda and source.is_cuda)
        for tensor in (target, source):
            writes = tensor is target
            if isinstance(tensor, DeviceTensor):
                accesses.append(access_of(tensor, writes=writes))
                sides.append(tensor.values)
                continue
            block, memory = self._pinned.get(tensor.untyped_storage().data_ptr(), (None, None))
            if block is not None and memory is not None:
                accesses.append(memory.all_rows(writes=writes))
                memory.users.add(self.device.current)
                shape = (tensor.shape, tensor.stride(), tensor.storage_offset())
                sides.append(torch.empty(0, dtype=tensor.dtype).set_(block.untyped_storage(), shape[2], *shape[:2]))
            else:  # a driver reads or writes pageable memory before it returns
                sides.append(tensor if writes else tensor.clone())
                waits |= writes

        def run() -> Sequence[Access]:
            with torch.inference_mode():
                sides[0].copy_(sides[1])
            return accesses

        operation = self.device.launch("copy", run)
        if waits:
            self.device.wait(operation)
        return target

    def _launch(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Queues an operation; its result exists at once, without content."""
        bare_args, bare_kwargs = values_of(args), values_of(kwargs)
        touched: list[tuple[Memory, Callable[[], Rows], bool]] = []
        changed: list[Any] = []
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors_in(given):
                touched.append((tensor.handle.memory, _rows_touched(tensor, name, place, bare_args), writes))
            if writes:
                changed.append(given)
        made = changed[0] if len(changed) == 1 else tuple(changed)
        targets: list[DeviceTensor] = []
        if not changed:
            made = _map(torch.Tensor, self._allocate, func(*_zeros_for(bare_args), **_zeros_for(bare_kwargs)))
            if name.startswith(("empty", "new_empty")):
                return made
            targets = _tensors_in(made)
            touched += [(tensor.handle.memory, lambda: slice(None), True) for tensor in targets]
        values = [tensor.values for tensor in targets]
        del args, kwargs, changed, targets  # pending operations must not keep memory alive

        def run() -> Sequence[Access]:
            found = [Access(memory, rows(), writes) for memory, rows, writes in touched]
            with torch.inference_mode():
                outcome = func(*bare_args, **bare_kwargs)
                if values:
                    for target, value in zip(values, _tensors_in(outcome, torch.Tensor), strict=True):
                        target.copy_(value)
            return found

        self.device.launch(name, run)
        return made


def _map(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """Does what torch's ``tree_map_only`` does, twelve times as fast."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _map(kind, change, each) for name, each in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)([_map(kind, change, each) for each in tree])
    return tree


def _tensors_in(tree: Any, kind: type = DeviceTensor) -> list[Any]:
    found: list[Any] = []
    _map(kind, found.append, tree)
    return found


def values_of(tree: Any) -> Any:
    """Replaces the device's tensors by their CPU tensors."""
    return _map(DeviceTensor, lambda tensor: tensor.values, tree)


def _zeros_for(tree: Any) -> Any:
    """Replaces tensors by zeros, which any operation accepts, to find the shapes of results."""
    return _map(torch.Tensor, lambda t: torch.empty_strided(*_layout(t), dtype=t.dtype).zero_(), tree)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is composed of others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def handle_of(tensor: torch.Tensor) -> Handle:
    """The allocation of a tensor of the device."""
    if not isinstance(tensor, DeviceTensor):
        raise TypeError("a tensor of the device was expected")
    return tensor.handle


def access_of(tensor: torch.Tensor, *, writes: bool) -> Access:
    """An access to a whole tensor of the device."""
    return Access(handle_of(tensor).memory, _rows_of(tensor), writes)


def _rows_of(tensor: torch.Tensor) -> slice:
    """The rows from a tensor's first element to its last."""
    values, row_bytes = values_of(tensor), handle_of(tensor).memory.row_bytes
    if not values.numel():
        return slice(0, 0)
    last = sum((size - 1) * stride for size, stride in zip(*_layout(values), strict=True))
    start = values.storage_offset() * values.itemsize
    return slice(start // row_bytes, -(-(start + (last + 1) * values.itemsize) // row_bytes))


def _rows_touched(tensor: DeviceTensor, name: str, place: int, args: Any) -> Callable[[], Rows]:
    """The rows that an operation touches of an argument, evaluated when the operation runs."""
    whole, values = _rows_of(tensor), tensor.values
    index = None
    if place == 0 and name in _INDEXED and args[1] == 0:
        index = args[2]
    elif place == 0 and name in ("index", "index_put_", "_index_put_impl_") and args[1][0] is not None:
        index = args[1][0]
    is_row = values.dim() > 0 and values.stride(0) * values.itemsize == tensor.handle.memory.row_bytes
    if index is None or index.dtype == torch.bool or not is_row:
        return lambda: whole
    first = whole.start
    return lambda: index.numpy().ravel() % len(values) + first

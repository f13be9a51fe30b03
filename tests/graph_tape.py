"""A recorder whose recordings behave like CUDA graphs: tapes of operations with their arguments, without Python.

Operations are recorded where torch dispatches them. On the tape, tensors are places in memory and numbers are fixed:

* memory from before the recording is known only by its address, and must still exist when the tape runs;
* memory that was allocated during the recording is kept, and each run of the tape overwrites it;
* operations that a capture cannot contain, such as those that wait for the device, are refused.

So a number, a decision or an address that the recorded Python took from one batch applies to all later batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.device_waits import fill_by_mask, sets_number_by_mask

_WAITING = (
    "_local_scalar_dense item is_nonzero equal nonzero nonzero_numpy argwhere masked_select _unique2 unique_dim "
    "unique_consecutive bincount"
)
"""Operations that need results on the host, at least for the size of their own result."""
_WAITING_OPS = frozenset(f"aten::{name}" for name in _WAITING.split())
_HOST_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__})
"""Reads of CPU tensors that torch executes without dispatching an operation."""
_MASKS = (torch.bool, torch.uint8)
_WAITS = "called a synchronizing CUDA operation"
"""Torch's message under ``torch.cuda.set_sync_debug_mode("error")``."""
_POISON = -77


class NotRecordableError(RuntimeError):
    """A capture would fail here."""


class FreedMemoryError(RuntimeError):
    """The tape uses memory that was freed after the recording."""


@dataclass(frozen=True)
class Place:
    """A tensor by its place in memory.

    Attributes:
        storage: number of the storage, in the order of first use.
        held: the tensor itself, if the tape owns its memory.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    held: torch.Tensor | None = field(compare=False, repr=False)


@dataclass(frozen=True)
class Struct:
    """A dataclass whose fields are frozen."""

    cls: type
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Entry:
    """An operation.

    Attributes:
        arguments: flat arguments of the call, with :class:`Place` for tensors and :class:`Struct` for dataclasses.
        results: position and tensor of each result that is not a view of an argument.
    """

    name: str
    arguments: tuple[Any, ...]
    call: Callable[[list[Any]], Any] = field(compare=False, repr=False)
    results: tuple[tuple[int, torch.Tensor], ...] = field(compare=False, repr=False)
    allocates: bool = False


class Tape:
    """A recording. Tapes are equal if they have the same operations with the same numbers and places."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._numbers: dict[int, int] = {}
        self._outside: dict[int, StorageWeakRef] = {}
        self._owned: list[torch.UntypedStorage] = []

    def __eq__(self, other: object) -> bool:
        """Compares memory from before the recordings by address, and memory of the tapes by number."""
        if not isinstance(other, Tape):
            return NotImplemented
        return self.entries == other.entries and self._addresses() == other._addresses()

    __hash__ = None  # type: ignore[assignment]

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Appends an operation that was just executed."""
        flat, spec = tree_flatten((args, kwargs))
        known = {_key(tensor) for tensor in flat if isinstance(tensor, torch.Tensor)}
        results = tuple(
            (index, tensor)
            for index, tensor in enumerate(tree_flatten(result)[0])
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in known
        )
        schema = func._schema
        if not results and not schema.is_mutable:
            return  # a view, or a query of shapes
        arguments = tuple(self._frozen(value) for value in flat)
        for _, tensor in results:
            self._own(tensor)

        def call(values: list[Any]) -> Any:
            new_args, new_kwargs = tree_unflatten(values, spec)
            return func(*new_args, **new_kwargs)

        name = str(func)
        allocates = schema.name.startswith(("aten::empty", "aten::new_empty"))
        self.entries.append(Entry(name, arguments, call, results, allocates))

    def note_launch(self, name: str, kernel: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Appends the launch of a kernel outside of torch."""
        flat, spec = tree_flatten((args, kwargs))
        arguments = tuple(self._frozen(value) for value in flat)

        def call(values: list[Any]) -> Any:
            new_args, new_kwargs = tree_unflatten(values, spec)
            return kernel(*new_args, **new_kwargs)

        self.entries.append(Entry(name, arguments, call, ()))

    def keep(self, tensor: torch.Tensor) -> None:
        """Keeps a number of the host that operations receive by value."""
        self._own(tensor)

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The memory from before the recording.

        Raises:
            FreedMemoryError: some of the memory has been freed.
        """
        found = {}
        for number, reference in self._outside.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                users = sorted({entry.name for entry in self.entries if number in _numbers_of(entry.arguments)})
                raise FreedMemoryError(f"memory that {', '.join(users)} use was freed after the recording")
            found[number] = storage
        return found

    @torch.inference_mode()
    def replay(self) -> None:
        """Executes all operations again. Raises :class:`FreedMemoryError`; see :meth:`storages`."""
        storages = self.storages()
        for entry in self.entries:
            if entry.allocates:
                for _, tensor in entry.results:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else _POISON)
                continue
            found = tree_flatten(entry.call([_thawed(value, storages) for value in entry.arguments]))[0]
            for index, tensor in entry.results:
                tensor.copy_(found[index])

    def _frozen(self, value: Any) -> Any:
        if is_dataclass(value):
            names = [each.name for each in fields(value)]
            return Struct(type(value), tuple((name, self._frozen(getattr(value, name))) for name in names))
        if isinstance(value, float) and math.isnan(value):
            return math.nan  # the same object, so that it equals itself
        if not isinstance(value, torch.Tensor):
            return value
        key = _key(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._outside[self._numbers[key]] = StorageWeakRef(value.untyped_storage())
        number = self._numbers[key]
        held = None if number in self._outside else value
        return Place(number, value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), held)

    def _own(self, tensor: torch.Tensor) -> None:
        self._owned.append(tensor.untyped_storage())  # keeps its key unique
        self._numbers[_key(tensor)] = len(self._numbers)

    def _addresses(self) -> dict[int, int]:
        return {number: storage.data_ptr() for number, storage in self.storages().items()}


class TapeRecorder:
    """Implements :class:`baton.engine.runner.graph_recorder.Recorder`.

    Attributes:
        tapes, runs: the tapes and the recorded functions, in the order of recording.
        last_replayed: number of the recording that was replayed last.
        paused: whether a kernel runs, whose operations are not recorded.
    """

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.runs: list[Callable[[], None]] = []
        self.num_replays = 0
        self.last_replayed: int | None = None
        self.paused = False
        self._taping: Tape | None = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with self.taping() as tape:
            run()
        number = len(self.tapes)
        self.tapes.append(tape)
        self.runs.append(run)

        def replay() -> None:
            self.num_replays += 1
            self.last_replayed = number
            tape.replay()

        return replay

    def discard(self) -> None:
        self.tapes.clear()
        self.runs.clear()

    @contextmanager
    def taping(self) -> Iterator[Tape]:
        """A tape that records what is computed within the context."""
        tape = self._taping = Tape()
        try:
            with self.refusing(tape):
                yield tape
        finally:
            self._taping = None
        tape.storages()  # raises if the tape uses memory that has already been freed

    @contextmanager
    def refusing(self, tape: Tape | None = None) -> Iterator[None]:
        """In this context, operations that wait for the device raise :class:`NotRecordableError`."""
        with _HostReads(self), _Operations(self, tape):
            yield

    def kernel(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a host function that stands in for a kernel, so that the tape records it as one launch."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            if self._taping is not None and not self.paused:
                self._taping.note_launch(name, function, args, kwargs)
            before, self.paused = self.paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = before

        return launch

    def triton_kernel(self, kernel: Any) -> TritonKernel:
        """Wraps a Triton kernel, so that the tape records its launches with their grids."""
        return TritonKernel(self, kernel)


class TritonKernel:
    """A kernel that is launched as ``kernel[grid](...)``."""

    def __init__(self, recorder: TapeRecorder, kernel: Any) -> None:
        self._recorder = recorder
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self._recorder.kernel(f"{self._kernel.__name__}{list(grid)}", self._kernel[grid])


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: TapeRecorder, tape: Tape | None) -> None:
        super().__init__()
        self._recorder = recorder
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder.paused:
            return func(*args, **kwargs)
        if _waits(func, args):
            raise NotRecordableError(f"{_WAITS}: {func}")
        with self:  # in inference mode, composite operations arrive undecomposed
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if self._tape is not None:
            if func._schema.name == "aten::lift_fresh":
                self._tape.keep(args[0])
            self._tape.note(func, args, kwargs, result)
        return result


class _HostReads(TorchFunctionMode):
    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS and not self._recorder.paused:
            raise NotRecordableError(f"{_WAITS}: Tensor.{func.__name__}")
        if sets_number_by_mask(func, args):
            return fill_by_mask(*args)
        return func(*args, **(kwargs or {}))


def _waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operation would make the host wait if its tensors were on a device."""
    name = func._schema.name
    if name == "aten::lift_fresh":  # host numbers become a tensor; a single number is passed to kernels by value
        return args[0].dim() > 0
    if name == "aten::repeat_interleave":
        return isinstance(args[-1], torch.Tensor)
    if name.startswith(("aten::index", "aten::_index_put")) and len(args) > 1 and isinstance(args[1], list | tuple):
        return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in args[1])
    return name in _WAITING_OPS


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _thawed(value: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, Struct):
        return value.cls(**{name: _thawed(own, storages) for name, own in value.fields})
    if not isinstance(value, Place):
        return value
    if value.held is not None:
        return value.held
    empty = torch.empty(0, dtype=value.dtype)
    return empty.set_(storages[value.storage], value.offset, value.shape, value.strides)  # type: ignore[call-overload]


def _numbers_of(values: Iterable[Any]) -> set[int]:
    found = set()
    for value in values:
        if isinstance(value, Place):
            found.add(value.storage)
        elif isinstance(value, Struct):
            found |= _numbers_of(own for _, own in value.fields)
    return found

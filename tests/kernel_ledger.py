"""Counts a step's kernels and bytes on the meta device, without a GPU and for models of any size.

An operation that computes counts as one kernel; views and allocations count as none. Sorting operations count as one
kernel although they launch several. Attention counts as the launches of the Triton backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.engine.attention import triton_paged

_ALLOCATIONS = {"empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like", "_unsafe_view"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"}
# Operations that read or write only a part of their first tensor, of the size of their result or input.
_ROW_READS = {"embedding", "index_select", "index", "gather"}
_ROW_WRITES = {"index_copy_", "index_put_", "scatter_"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A counted kernel.

    Attributes:
        name: name of the operation.
        layer: the decoder layer that launched it; ``None`` outside of layers.
        num_bytes: bytes read and written, assuming no caches.
    """

    name: str
    layer: int | None
    num_bytes: int

    @property
    def is_product(self) -> bool:
        """Whether the kernel multiplies matrices."""
        return self.name in _PRODUCTS


class KernelLedger(TorchDispatchMode):
    """A context in which kernels are counted.

    Args:
        layers: decoder layers; kernels between them belong to no layer.
        num_keys: number of keys that the step's sequences attend to, in total.

    Attributes:
        kernels: the counted kernels in order.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], num_keys: int) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._num_keys = num_keys
        self._layer: int | None = None
        self._hooks = ExitStack()
        for index, layer in enumerate(layers):
            self._hooks.enter_context(layer.register_forward_pre_hook(self._enters(index)))
            self._hooks.enter_context(layer.register_forward_hook(self._enters(None)))

    def of_layer(self, layer: int | None) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.layer == layer]

    def names(self, layer: int | None) -> Counter[str]:
        return Counter(kernel.name for kernel in self.of_layer(layer))

    def book_attention(self, name: str, tensors: Sequence[torch.Tensor], num_cached: int = 0) -> None:
        """Adds a kernel of attention.

        Args:
            tensors: tensors that the kernel reads or writes completely.
            num_cached: bytes of a key and its value, over all heads.
        """
        self.kernels.append(Kernel(name, self._layer, sum(map(_bytes, tensors)) + num_cached * self._num_keys))

    @contextmanager
    def open(self) -> Iterator[KernelLedger]:
        """Counts everything that is computed in the context, including Triton's launches."""
        with self, self._hooks, pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_paged, "attend", _Booked(self, "attend"))
            patch.setattr(triton_paged, "merge", _Booked(self, "merge"))
            yield self

    def _enters(self, layer: int | None) -> Any:
        def enter(*args: Any) -> None:
            self._layer = layer

        return enter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operations arrive undecomposed
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in _ALLOCATIONS:
            return result
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if any(tensor.is_meta for tensor in (*inputs, *outputs)):
            self.kernels.append(Kernel(name, self._layer, _moved(name, inputs, outputs)))
        return result


class _Booked:
    """Stands in for a Triton kernel."""

    def __init__(self, ledger: KernelLedger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if self._name == "merge":
            return lambda output, target, stats, *_, **__: self._ledger.book_attention("merge", (output, target, stats))
        return self._attend

    def _attend(self, query: Any, keys: Any, values: Any, *others: Any, **constants: Any) -> None:
        _, _, target, partial, stats = others[:5]
        written = (target, partial, stats) if constants["is_divided"] else (target,)
        self._ledger.book_attention("attend", (query, *written), sum(_bytes(rows[0]) for rows in (keys, values)))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; an expanded element counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _moved(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    if name in _ROW_READS:
        return sum(map(_bytes, inputs[1:])) + 2 * sum(map(_bytes, outputs))
    if name in _ROW_WRITES:
        return sum(map(_bytes, inputs[1:])) + _bytes(inputs[-1])
    if name in ("copy_", "fill_", "zero_"):
        return sum(map(_bytes, inputs))
    return sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))

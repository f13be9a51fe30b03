"""The paged KV cache: tensors, and copies into and out of them.

keys[layer]    [num_slots, num_kv_heads, key_dim]       in the model's dtype; or int8, with a scale after each vector:
values[layer]  [num_slots, num_kv_heads, value_dim]     [num_slots, num_kv_heads, dim + 4], see kv_int8.py

slot = block_id * block_size + offset in the block

     block 0          block 1          block 2
|a0 a1 a2 a3|    |b0 b1 -- --|    |a4 a5 -- --|      request a owns blocks [0, 2], request b owns [1]
"""

from __future__ import annotations

import contextlib
import math
import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import SCALE_BYTES, KVCacheSpec, KVEncoding
from baton.engine.device.uploads import TORCH_DTYPES, upload_ints
from baton.engine.kv_cache import kv_int8
from baton.engine.kv_cache.head_rows import HeadRows, join_rows
from baton.engine.kv_cache.kv_copies import CopyQueue, WatchedCopies, WorkMark, copy_queue_for

Allocator = Callable[[tuple[int, int, int], torch.dtype, torch.device], torch.Tensor]
"""Returns a tensor of zeros."""

_MAX_AT_ONCE = 256 * 1024
"""Bytes that are encoded or decoded together, so that intermediate results stay in the processor's caches."""


def slots_of(block_ids: Sequence[int], start: int, end: int, block_size: int) -> torch.Tensor:
    """Slots of positions ``[start, end)`` of a sequence with the blocks ``block_ids``; int64 ``[end - start]``."""
    return torch.from_numpy(slot_array(block_ids, start, end, block_size))


def slot_array(block_ids: Sequence[int], start: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
    """Like :func:`slots_of`, in numpy, whose small operations cost a third of torch's."""
    first = start // block_size
    blocks = np.array(block_ids[first : -(-end // block_size)], dtype=np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
    return slots[start - first * block_size : end - first * block_size]


def slot_of(block_ids: Sequence[int], position: int, block_size: int) -> int:
    """Slot of one position of a sequence."""
    return block_ids[position // block_size] * block_size + position % block_size


class PagedKVCache:
    """Keys and values of all layers, those of a draft last, in one pool of slots.

    Args:
        spec: the layout.
        num_blocks: blocks in the pool.
        device: where the tensors live.
        scratch: adds one block for writes whose content is never read.
        copies: copies bytes out of and into a cache that is not in the host's memory; the device's own by default.
        allocate: allocates the tensors.

    Attributes:
        keys, values: by layer, as above; what attention reads and writes.
        scratch_block: id of the scratch block, which the pool does not contain; ``None`` without one.
        on_copy_error: called with the error of a copy between the cache and the host, in the thread that copies.

    Raises:
        UnsupportedModelError: the encoding does not support vectors of this length.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        device: torch.device,
        *,
        scratch: bool = False,
        copies: CopyQueue | None = None,
        allocate: Allocator | None = None,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device
        self._dtype = TORCH_DTYPES[spec.dtype]
        queue = copies or copy_queue_for(device)
        self._copies = None if queue is None else WatchedCopies(queue, lambda error: self.on_copy_error(error))
        self.on_copy_error: Callable[[Exception], None] = lambda error: None
        self.scratch_block = num_blocks if scratch else None
        num_slots = (num_blocks + scratch) * spec.block_size
        self._allocate = allocate or allocate_zeros
        layers = list(enumerate(spec.all_layers))
        self.keys = [self._rows_of(num_slots, index, layer.num_kv_heads, layer.key_dim) for index, layer in layers]
        self.values = [self._rows_of(num_slots, index, layer.num_kv_heads, layer.value_dim) for index, layer in layers]
        pairs = zip(self.keys, self.values, strict=True)
        self._rows = [(HeadRows.of(keys), HeadRows.of(values)) for keys, values in pairs]
        self._move_in_others: Callable[[Sequence[int], Sequence[int]], None] | None = None
        self._bytes: dict[int, tuple[memoryview, int]] = {}  # by address; asking torch takes longer than the copies

    def _rows_of(self, num_slots: int, layer: int, num_heads: int, dim: int) -> torch.Tensor:
        if self.spec.kept_as(layer) is KVEncoding.NATIVE:
            return self._allocate((num_slots, num_heads, dim), self._dtype, self.device)
        if dim % SCALE_BYTES:
            raise UnsupportedModelError(
                f"engine.kv_cache is int8, which needs head sizes that are multiples of {SCALE_BYTES}, but "
                "the model has "
                f"heads of size {dim}. Set engine.kv_cache: native."
            )
        return self._allocate((num_slots, num_heads, dim + SCALE_BYTES), torch.int8, self.device)

    def add_ranks(
        self,
        spec: KVCacheSpec,
        heads: Sequence[Sequence[range]],
        others: Sequence[Sequence[torch.Tensor]],
        move: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        """Turns the cache of rank 0 into that of all ranks: its bytes are those of all heads from now on.

        Attention still reads and writes :attr:`keys` and :attr:`values`, the heads of this rank.

        Args:
            spec: the layout with all heads.
            heads: the heads that each rank holds, by layer of the model and rank.
            others: tensors of the other ranks: keys and values of the model's first layer, of its second one, ...
            move: does in the other ranks what :meth:`move` does here.
        """
        self.spec = spec
        self._move_in_others = move
        for layer, of_layer in enumerate(heads):
            num_heads = spec.layers[layer].num_kv_heads
            keys = [self.keys[layer], *(tensors[2 * layer] for tensors in others)]
            values = [self.values[layer], *(tensors[2 * layer + 1] for tensors in others)]
            self._rows[layer] = (join_rows(keys, of_layer, num_heads), join_rows(values, of_layer, num_heads))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores ``keys`` and ``values`` (``[num_tokens, num_kv_heads, dim]``) at ``slots`` (``[num_tokens]``)."""
        if self.spec.kept_as(layer) is KVEncoding.INT8:
            keys, values = kv_int8.encode_rows(keys), kv_int8.encode_rows(values)
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and the values at ``slots``, ``[num_slots, num_kv_heads, dim]`` in the model's dtype."""
        keys, values = (tensors[layer].index_select(0, slots) for tensors in (self.keys, self.values))
        if self.spec.kept_as(layer) is KVEncoding.INT8:
            return kv_int8.decode_rows(keys, self._dtype), kv_int8.decode_rows(values, self._dtype)
        return keys, values

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots ``sources`` to as many slots ``targets`` in every layer; they may overlap."""
        if self._move_in_others is not None:
            self._move_in_others(sources, targets)
        read, written = upload_ints(sources, self.device), upload_ints(targets, self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, written, tensor.index_select(0, read))

    def mark(self) -> WorkMark | None:
        """Marks what is computed so far, for copies that need not wait for more; ``None`` on a CPU. Engine's thread."""
        return None if self._copies is None else self._copies.mark()

    def join(self, imported: WorkMark | None) -> None:
        """Orders later work of the engine after the import that returned ``imported``. Engine's thread."""
        if self._copies is None or imported is None:
            return
        if self._move_in_others is None:
            self._copies.join(imported)
        else:  # the streams of other ranks cannot wait for it
            self._copies.wait(imported)

    def backlog(self) -> WorkMark | None:
        """The mark to :meth:`wait` for before more is imported; ``None`` means that there is room."""
        return None if self._copies is None else self._copies.backlog()

    def wait(self, mark: WorkMark) -> None:
        """Blocks until the device has reached a mark of :meth:`mark` or :meth:`backlog`."""
        if self._copies is not None:
            self._copies.wait(mark)

    def staging(self, num_bytes: int) -> torch.Tensor | None:
        """Host memory from which :meth:`import_bytes` copies without waiting, uint8 ``[num_bytes]``.

        Returns ``None`` for a cache in this process's memory.
        """
        return None if self._copies is None else self._copies.host_memory(num_bytes)

    def export_bytes(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        layers: range,
        into: memoryview | None = None,
        encoding: KVEncoding = KVEncoding.NATIVE,
        after: WorkMark | None = None,
    ) -> memoryview:
        """Positions ``[start, end)`` of ``layers`` as bytes: for each layer its keys, then its values.

        Safe while the engine runs: the caller leases the blocks, and computed positions never change.

        Args:
            into: writable memory to use instead of new memory, of exactly that length (else ValueError) and aligned for
                the dtype.
            encoding: encoding of the bytes; native for a cache that is encoded itself.
            after: mark of the work that computes them; by default everything that the engine has queued, in its thread.
        """
        num_bytes = (end - start) * self.spec.layer_bytes_per_token(layers.start, layers.stop, encoding)
        if into is not None and into.nbytes != num_bytes:
            raise ValueError(f"a buffer for a KV part of {num_bytes} bytes was expected, got {into.nbytes}")
        slots = slots_of(block_ids, start, end, self.spec.block_size)
        copies = self._copies
        if into is not None:
            out = torch.frombuffer(into, dtype=torch.uint8)
        else:
            out = torch.empty(num_bytes, dtype=torch.uint8) if copies is None else copies.host_memory(num_bytes)
        if copies is None:
            self._gather(out, slots, layers, encoding)
            return out.numpy().data

        host_slots = _into(copies.host_memory(slots.nbytes), slots)

        def copy() -> None:
            # The part is assembled on the device and copied once, instead of twice for each layer.
            gathered = torch.empty_like(out, device=self.device)
            self._gather(gathered, host_slots.to(self.device, non_blocking=True), layers, encoding)
            out.copy_(gathered, non_blocking=True)

        copies.fetch(copy, copies.mark() if after is None else after)
        return out.numpy().data

    def _gather(self, out: torch.Tensor, slots: torch.Tensor, layers: range, encoding: KVEncoding) -> None:
        if encoding is KVEncoding.INT8:
            for group, place in self._int8_places(layers, len(slots)):
                shape = (len(group), len(slots), group[0].num_heads, group[0].dim)
                vectors = torch.empty(shape, dtype=group[0].dtype, device=out.device)
                for rows, read in zip(group, vectors, strict=True):
                    rows.read_into(read, slots)
                kv_int8.encode(vectors, out[place].view(len(group), -1))
            return
        for rows, place in self._places(layers, len(slots)):
            rows.read_into(out[place].view(rows.dtype).view(len(slots), rows.num_heads, rows.dim), slots)

    def import_bytes(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        layers: range,
        data: memoryview | torch.Tensor,
        encoding: KVEncoding = KVEncoding.NATIVE,
        after: WorkMark | None = None,
    ) -> WorkMark | None:
        """Writes the bytes of :meth:`export_bytes` into the cache.

        Returns:
            A mark that the engine must :meth:`join` before it reads or overwrites the bytes; ``None`` if it need not.

        Args:
            data: of exactly that length, else ValueError. A tensor comes from :meth:`staging` and is not written again.
            after: mark of the work after which the blocks are free; by default everything that the engine has queued,
                in its thread.
        """
        expected = (end - start) * self.spec.layer_bytes_per_token(layers.start, layers.stop, encoding)
        if data.nbytes != expected:
            raise ValueError(f"a KV part of {expected} bytes was expected, got {data.nbytes}")
        slots = slots_of(block_ids, start, end, self.spec.block_size)
        copies = self._copies
        if copies is None:
            self._scatter_on_cpu(_as_tensor(data), slots, layers, encoding)
            return None
        staged = data if isinstance(data, torch.Tensor) else copies.host_memory(expected).copy_(_as_tensor(data))
        host_slots = _into(copies.host_memory(slots.nbytes), slots)

        def copy() -> None:
            received = staged.to(self.device, non_blocking=True)
            self._scatter(received, host_slots.to(self.device, non_blocking=True), layers, encoding)

        return copies.bring(copy, copies.mark() if after is None else after, expected)

    def _scatter(self, data: torch.Tensor, slots: torch.Tensor, layers: range, encoding: KVEncoding) -> None:
        if encoding is KVEncoding.NATIVE:
            for rows, place in self._places(layers, len(slots)):
                rows.write(slots, data[place].view(rows.dtype).view(-1, rows.num_heads, rows.dim))
            return
        for rows, vectors in self._decoded(data, layers, len(slots)):
            rows.write(slots, vectors)

    def _scatter_on_cpu(self, data: torch.Tensor, slots: torch.Tensor, layers: range, encoding: KVEncoding) -> None:
        if encoding is KVEncoding.NATIVE:  # ``data`` may be at any address
            for rows, place in self._places(layers, len(slots)):
                rows.write_bytes(slots, data[place].numpy())
            return
        for rows, vectors in self._decoded(data, layers, len(slots)):
            rows.write_bytes(slots, vectors.view(torch.uint8).view(-1).numpy())

    def _decoded(self, data: torch.Tensor, layers: range, num_tokens: int) -> Iterator[tuple[HeadRows, torch.Tensor]]:
        """Yields the rows of some layers with their decoded int8 data, ``[num_tokens, num_heads, dim]``."""
        for group, place in self._int8_places(layers, num_tokens):
            shape = (num_tokens, group[0].num_heads, group[0].dim)
            decoded = kv_int8.decode(data[place].view(len(group), -1), shape, group[0].dtype)
            yield from zip(group, decoded, strict=True)

    def pieces(self, block_ids: Sequence[int], start: int, end: int, layers: range) -> list[memoryview] | None:
        """Writable views of the bytes of :meth:`export_bytes`, one per contiguous stretch, in the same order.

        Returns ``None`` for a cache that is not in this process's memory, or has several ranks. The caller leases the
        blocks.
        """
        if self._copies is not None or self._move_in_others is not None:
            return None
        size = self.spec.block_size
        stretches: list[list[int]] = []  # first slot and the one after the last; adjacent blocks are merged
        for index in range(start // size, -(-end // size)):
            first = block_ids[index] * size + max(0, start - index * size)
            behind = block_ids[index] * size + min(size, end - index * size)
            if stretches and stretches[-1][1] == first:
                stretches[-1][1] = behind
            else:
                stretches.append([first, behind])
        views = []
        for layer in layers:
            for tensor in (self.keys[layer], self.values[layer]):
                rows, row = self._bytes_of(tensor)
                views += [rows[first * row : behind * row] for first, behind in stretches]
        return views

    def _bytes_of(self, tensor: torch.Tensor) -> tuple[memoryview, int]:
        """All bytes of a tensor of the cache, and the number of bytes of one slot."""
        found = self._bytes.get(tensor.data_ptr())
        if found is None:
            rows = tensor.view(torch.uint8).view(-1).numpy().data
            found = self._bytes[tensor.data_ptr()] = (rows, len(rows) // len(tensor))
        return found

    def pass_through(self, block_ids: Sequence[int], num_tokens: int, encoding: KVEncoding) -> None:
        """Makes the model's KV of the first tokens what it would be after a transfer in that encoding."""
        layers = range(len(self.spec.layers))
        data = self.export_bytes(block_ids, 0, num_tokens, layers, encoding=encoding)
        self.join(self.import_bytes(block_ids, 0, num_tokens, layers, data, encoding))

    def _places(
        self, layers: range, num_tokens: int, encoding: KVEncoding = KVEncoding.NATIVE
    ) -> Iterator[tuple[HeadRows, slice]]:
        """Yields the keys and the values of some layers, and the byte range of the rows of ``num_tokens`` tokens."""
        offset = 0
        for layer in layers:
            for rows in self._rows[layer]:
                size = num_tokens * rows.num_heads * encoding.vector_bytes(rows.dim, rows.dtype.itemsize)
                yield rows, slice(offset, offset + size)
                offset += size

    def _int8_places(self, layers: range, num_tokens: int) -> Iterator[tuple[list[HeadRows], slice]]:
        """Like :meth:`_places` for int8, grouped by shape: one operation costs as much as thousands of numbers."""
        group: list[HeadRows] = []
        start = end = 0
        for rows, place in self._places(layers, num_tokens, KVEncoding.INT8):
            is_alike = not group or (rows.num_heads, rows.dim) == (group[0].num_heads, group[0].dim)
            if not is_alike or (group and place.stop - start > _MAX_AT_ONCE):
                yield group, slice(start, end)
                group, start = [], end
            group.append(rows)
            end = place.stop
        yield group, slice(start, end)


def allocate_zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU, zeros in pages (huge ones where available) that the system zeroes at first use, so that a worker does
    not wait for a whole GiB."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _into(memory: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copies the slots into ``memory``, which has as many bytes."""
    return memory.view(slots.dtype).copy_(slots)


def _as_tensor(data: memoryview | torch.Tensor) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data
    with warnings.catch_warnings():  # a received message is read-only, and the tensor is only read
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)

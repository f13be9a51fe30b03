"""The paged KV cache: tensors, and copies into and out of them.

keys[layer]    [num_slots, num_kv_heads, key_dim]
values[layer]  [num_slots, num_kv_heads, value_dim]

slot = block_id * block_size + offset in the block

     block 0          block 1          block 2
|a0 a1 a2 a3|    |b0 b1 -- --|    |a4 a5 -- --|      request a owns blocks [0, 2], request b owns [1]
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from engine.kv_spec import KVCacheSpec

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def slots_of(block_ids: Sequence[int], start: int, end: int, block_size: int) -> torch.Tensor:
    """Slots of positions ``[start, end)`` of a sequence that lives in ``block_ids``; int64 ``[end - start]``."""
    first = start // block_size
    blocks = torch.tensor(block_ids[first : -(-end // block_size)], dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
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
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device
        dtype = TORCH_DTYPES[spec.dtype]
        num_slots = num_blocks * spec.block_size
        self.keys = [
            torch.zeros(num_slots, layer.num_kv_heads, layer.key_dim, dtype=dtype, device=device)
            for layer in spec.all_layers
        ]
        self.values = [
            torch.zeros(num_slots, layer.num_kv_heads, layer.value_dim, dtype=dtype, device=device)
            for layer in spec.all_layers
        ]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores ``keys`` and ``values`` (``[num_tokens, num_kv_heads, dim]``) at ``slots`` (``[num_tokens]``)."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies slots ``sources`` to slots ``targets`` (both ``[num_tokens]``) in every layer; they may overlap."""
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def export_bytes(self, block_ids: Sequence[int], start: int, end: int, layers: range) -> bytearray:
        """Positions ``[start, end)`` of ``layers`` as raw bytes: for each layer its keys, then its values.

        Safe while the engine runs: the caller leases the blocks, and computed positions never change.
        """
        slots = slots_of(block_ids, start, end, self.spec.block_size).to(self.device)
        out = bytearray((end - start) * self.spec.layer_bytes_per_token(layers.start, layers.stop))
        target = torch.frombuffer(out, dtype=torch.uint8)
        offset = 0
        for layer in layers:
            for tensor in (self.keys[layer], self.values[layer]):
                rows = tensor.index_select(0, slots).view(torch.uint8).flatten()
                target[offset : offset + rows.numel()].copy_(rows)
                offset += rows.numel()
        return out

    def import_bytes(self, block_ids: Sequence[int], start: int, end: int, layers: range, data: memoryview) -> None:
        """The reverse of :meth:`export_bytes`; ``data`` has exactly its length, else ValueError."""
        expected = (end - start) * self.spec.layer_bytes_per_token(layers.start, layers.stop)
        if data.nbytes != expected:
            raise ValueError(f"a KV part of {expected} bytes was expected, got {data.nbytes}")
        slots = slots_of(block_ids, start, end, self.spec.block_size).to(self.device)
        with warnings.catch_warnings():  # a received message is read-only, and so is what is done with it
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            source = torch.frombuffer(data, dtype=torch.uint8)
        offset = 0
        for layer in layers:
            for tensor in (self.keys[layer], self.values[layer]):
                size = (end - start) * tensor[0].numel() * self.spec.item_size
                chunk = source[offset : offset + size]
                if chunk.data_ptr() % self.spec.item_size:  # a view needs its elements aligned, a message may not be
                    chunk = chunk.clone()
                rows = chunk.view(tensor.dtype).view(end - start, *tensor.shape[1:])
                tensor.index_copy_(0, slots, rows.to(self.device))
                offset += size

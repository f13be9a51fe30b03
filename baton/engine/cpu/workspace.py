"""Memory for values between the stages of a forward. It grows to the largest step and is reused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.engine.cpu.attention import scratch_floats
from baton.engine.cpu.linear import product_scratch_bytes
from baton.engine.cpu.program import counter_bytes
from baton.engine.cpu.structure import Decoder
from baton.engine.cpu.tables import Step
from baton.engine.cpu.tiles import TILE

_ALIGNMENT = 64


class Workspace:
    """One forward's memory; forwards of one decoder never overlap."""

    def __init__(self, decoder: Decoder) -> None:
        hidden, item = decoder.embedding.shape[1], decoder.embedding.element_size()
        queries = decoder.num_heads * decoder.head_dim
        self._bytes_per_token = {
            Step.STATES: 4 * hidden,
            Step.NORMED: item * decoder.input_size,
            Step.PROJECTED: 4 * (queries + 2 * decoder.num_kv_heads * decoder.head_dim),
            Step.QUERIES: item * queries,
            Step.MIXED: item * max(queries, hidden),
            Step.GATED: item * decoder.intermediate_size,
            Step.PACKED: item * max(decoder.input_size, queries, hidden),
        }
        widest = max(decoder.input_size, queries, decoder.intermediate_size)
        products = product_scratch_bytes(widest, item, is_quantized=decoder.is_quantized)
        scratch = max(4 * scratch_floats(decoder.head_dim), products)
        self._scratch_bytes = _padded(scratch)
        self._num_layers = len(decoder.layers)
        self._num_tokens = 0
        self._num_threads = 0
        self._memory = np.zeros(0, dtype=np.uint8)
        self._counters = np.zeros(0, dtype=np.uint8)
        self._places: dict[Step, int] = {}

    def fill(self, step: npt.NDArray[np.int64], num_tokens: int, num_threads: int) -> None:
        """Writes the addresses into a step's table and zeroes the counters."""
        if num_tokens > self._num_tokens or num_threads > self._num_threads:
            self._allocate(max(num_tokens, self._num_tokens), max(num_threads, self._num_threads))
        for column, address in self._places.items():
            step[column] = address
        step[Step.SCRATCH_BYTES] = self._scratch_bytes
        step[Step.NUM_THREADS] = num_threads
        self._counters.fill(0)

    def _allocate(self, num_tokens: int, num_threads: int) -> None:
        whole = -(-num_tokens // TILE) * TILE  # packed tokens fill whole tiles
        sizes = {column: _padded(whole * size) for column, size in self._bytes_per_token.items()}
        sizes[Step.SCRATCH] = num_threads * self._scratch_bytes
        counters = counter_bytes(self._num_layers, num_threads)
        self._memory = np.empty(sum(sizes.values()) + counters + _ALIGNMENT, dtype=np.uint8)
        address = int(self._memory.ctypes.data)
        place = _padded(address)
        self._places = {}
        for column, size in sizes.items():
            self._places[column] = place
            place += size
        self._places[Step.COUNTERS] = place
        self._counters = self._memory[place - address : place - address + counters]
        self._num_tokens, self._num_threads = num_tokens, num_threads


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

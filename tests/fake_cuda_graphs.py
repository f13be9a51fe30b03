"""The part of ``torch.cuda`` that graphs need, on the CPU. Captures create tapes, and the allocator's state is tracked.

The effects of a failed capture differ between versions of torch; see :class:`FakeCuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.graph_tape import Tape, TapeRecorder

PLACES = ("warm-up", "probe", "begin", "body", "end", "instantiate")
"""The stages of a recording in order."""
_REPLACED = (
    *("Stream", "current_stream", "stream", "current_device", "synchronize", "empty_cache", "memory_snapshot"),
    *("graph_pool_handle", "set_sync_debug_mode", "get_sync_debug_mode"),
)
Pool = tuple[int, int]


class FakeStream:
    """A stream; ``waited`` lists the streams for which it waited."""

    def __init__(self) -> None:
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


class FakeCuda:
    """Stands in for ``torch.cuda``.

    Args:
        tapes: creates the tapes of captures.
        version: ``"2.11"``: after a capture fails at its end, the allocator still considers it active; ``"2.13"``: it
            does not, but the pool keeps the failed capture's reference; ``"later"``: resetting the graph undoes both.

    Attributes:
        current: stream of this thread.
        streams: the created streams.
        num_captures: number of captures that were begun.
        references, underway: state of the allocator: references to each pool with memory, and captures into pools.
        num_freed: number of pools whose memory was freed.
        live: tensors in pools that are still in use.
        is_lost: whether the device answers every call with an error.
        sync_mode: the last value of ``set_sync_debug_mode``.
    """

    def __init__(self, tapes: TapeRecorder, version: str = "2.13") -> None:
        self.tapes = tapes
        self.version = version
        self.default = self.current = FakeStream()
        self.streams: list[FakeStream] = []
        self.num_captures = self.num_freed = self.num_pools = 0
        self.references: dict[Pool, int] = {}
        self.underway: set[Pool] = set()
        self.live: Callable[[], int] = lambda: 0
        self.is_lost = False
        self.sync_mode: int | str = 0
        self.capturing: FakeGraph | None = None
        self._refusing = ExitStack()
        self._fault: tuple[str, int, Exception] | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in _REPLACED:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def fail(self, place: str, capture: int, error: Exception) -> None:
        """Makes the recording with this number, from 0, fail at one of :data:`PLACES`."""
        self._fault = (place, capture, error)

    def reach(self, place: str) -> None:
        number = self.num_captures - (self.capturing is not None)
        if self._fault is not None and self._fault[:2] == (place, number):
            error = self._fault[2]
            if self.capturing is not None and isinstance(error, torch.AcceleratorError):
                self.capturing.is_spoiled = True
            raise error

    def compute(self) -> None:
        """Call this in the recorded work."""
        if self.capturing is not None:
            self.reach("body")
        elif self.current is not self.default:
            self.reach("probe" if self.sync_mode == "error" else "warm-up")

    def Stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert self.capturing is None, "a capture cannot contain that"

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Sets the mode; with ``"error"``, waiting operations are refused as by a tape."""
        self._refusing.close()
        self.sync_mode = mode
        if mode == "error":
            self._refusing.enter_context(self.tapes.refusing())

    def get_sync_debug_mode(self) -> int | str:
        return self.sync_mode

    def graph_pool_handle(self) -> Pool:
        self.num_pools += 1
        return (0, self.num_pools)

    def begin_allocate(self, pool: Pool) -> None:
        assert self.references.get(pool) != 0, "INTERNAL ASSERT FAILED: use_count > 0"
        self.references[pool] = self.references.get(pool, 0) + 1
        self.underway.add(pool)

    def end_allocate(self, device: int, pool: Pool) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: Pool) -> None:
        self.references[pool] -= 1
        assert self.references[pool] >= 0, "INTERNAL ASSERT FAILED: uc >= 0"

    def empty_cache(self) -> None:
        assert not self.underway, "INTERNAL ASSERT FAILED: captures_underway.empty()"
        for pool in [pool for pool, count in self.references.items() if not count and not self.live()]:
            del self.references[pool]
            self.num_freed += 1

    def memory_snapshot(self, pool: Pool, include_traces: bool = True) -> list[dict[str, Any]]:
        return [{"active_size": self.live()}] if pool in self.references else []


class FakeGraph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._pool: Pool | None = None
        self._tape: Tape | None = None
        self._taping = ExitStack()
        self._is_ended = self.is_spoiled = False

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        cuda = self._cuda
        assert capture_error_mode == "thread_local"
        assert cuda.current is not cuda.default, "CUDA graphs must be captured on a non-default stream"
        cuda.num_captures += 1
        self._pool, cuda.capturing = pool, self
        cuda.begin_allocate(pool)
        try:
            cuda.reach("begin")
        except Exception:
            cuda.capturing = None
            raise
        self._tape = self._taping.enter_context(cuda.tapes.taping())

    def capture_end(self) -> None:
        cuda = self._cuda
        assert cuda.capturing is self
        assert self._pool is not None
        try:
            try:
                self._taping.close()
                if self.is_spoiled:
                    raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
                cuda.reach("end")
            except Exception:
                if cuda.version != "2.11":
                    cuda.end_allocate(0, self._pool)
                raise
            cuda.end_allocate(0, self._pool)
            self._is_ended = True
            cuda.reach("instantiate")
        finally:
            cuda.capturing = None

    def reset(self) -> None:
        cuda, pool = self._cuda, self._pool
        if pool is None:
            return
        if cuda.version == "later" and pool in cuda.underway:
            cuda.end_allocate(0, pool)
        if self._is_ended or cuda.version == "later":
            cuda.release(0, pool)
        self._pool = self._tape = None
        self._is_ended = False

    def replay(self) -> None:
        assert self._tape is not None
        self._cuda.tapes.num_replays += 1
        self._tape.replay()

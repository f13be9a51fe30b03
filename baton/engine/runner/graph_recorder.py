"""Records work on the device so that it can be repeated with one call, and undoes a recording that fails."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from baton.engine.device.device_errors import is_out_of_memory

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_WAITS = "called a synchronizing CUDA operation"
"""Part of torch's message under ``set_sync_debug_mode("error")``."""


class RecordingError(RuntimeError):
    """The work cannot be recorded; it can still be computed step by step."""


class RecordingMemoryError(RecordingError):
    """There is too little memory for the recording."""


class ForwardWaitsError(RecordingError):
    """The work makes the host wait for the device, which a recording cannot contain.

    Attributes:
        place: file and line that waits; empty when unknown.
    """

    def __init__(self, place: str) -> None:
        super().__init__(f"the forward waits for the device{place and ' at '}{place}")
        self.place = place


@contextmanager
def recording_errors() -> Iterator[None]:
    """Raises every error inside the block as a :class:`RecordingError` that describes it."""
    try:
        yield
    except RecordingError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if _WAITS in reason:
            raise ForwardWaitsError(_place_of(error)) from error
        if is_out_of_memory(error):
            raise RecordingMemoryError(reason) from error
        raise RecordingError(f"{type(error).__name__}: {reason}") from error


class Recorder(Protocol):
    """Turns work into something that can be repeated."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that repeats, in the same memory, all that ``run`` does on the device.

        Raises:
            RecordingError: the work cannot be recorded. Call :meth:`discard` then.
        """
        ...

    def discard(self) -> None:
        """Frees all recordings and the memory they share; none of them may be repeated afterwards.

        Raises:
            RuntimeError: the device is lost.
        """
        ...


class CudaGraphRecorder:
    """Implements :class:`Recorder` with CUDA graphs. They share their memory, so that only one may run at a time.

    One stream serves all warm-ups and captures, because cuBLAS keeps a workspace for every stream that it has seen.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs the work twice and captures it in a third run.

        The first run compiles kernels and lets libraries allocate their workspaces. The second one detects, outside a
        capture, where it is harmless, whether the work waits for the device. The caller's stream is current afterwards
        in any case.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        caller = torch.cuda.current_stream()
        with recording_errors():
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                run()
                with _waiting_refused():
                    run()
                graph = self._capture(run)
            caller.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay

    def discard(self) -> None:
        torch.cuda.synchronize()  # a graph may still be running; a lost device raises here
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            _free_pool(pool)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures the work on the current stream.

        ``torch.cuda.graph`` would do the same, but if the end of the capture fails, it hides the first error and leaves
        the thread on the capture's stream.
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graphs' pool cannot use memory that the warm-up left cached
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # the first error is the cause
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Makes an operation that waits for the device raise a RuntimeError inside the block, in all threads."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _place_of(error: Exception) -> str:
    """The innermost line outside torch and this module."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH_FOLDER, __file__))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _free_pool(pool: torch.cuda._POOL_HANDLE) -> None:
    """Frees a pool whose graphs are reset, also if a capture into it failed.

    Up to torch 2.11 the allocator can believe that a failed capture is still under way, and then refuses to free any
    memory. Up to torch 2.13 it can keep the failed capture's reference to the pool. Later versions undo both in
    ``CUDAGraph.reset``, so each is checked before it is undone.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # no capture is under way
        torch._C._cuda_endAllocateToPool(device, pool)
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot(pool, include_traces=False)  # type: ignore[no-untyped-call]
    if segments and not any(segment["active_size"] for segment in segments):
        # Segments without live tensors were not freed: a reference is left.
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_releasePool(device, pool)
        torch.cuda.empty_cache()

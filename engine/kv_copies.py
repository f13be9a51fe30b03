"""Copies between a device's KV cache and the host, beside the stream in which the engine computes.

    engine's stream   step 1 ─ mark ─ step 2 ──────────── join ─ step 3
    outgoing                     └─ gather ─ to the host
    incoming                     └─ from the host ─ scatter ┘

Neither waits for what the engine has queued behind the mark. A step waits for what comes in if that was joined before,
and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

WorkMark: TypeAlias = Any
"""A point in the engine's stream: on CUDA, a ``torch.cuda.Event``."""


class CopyQueue(Protocol):
    """Where a cache is not in the host's memory."""

    def mark(self) -> WorkMark:
        """What the engine has queued so far; call it in the engine's thread."""
        ...

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Uint8 ``[num_bytes]`` that the device reads and writes by itself: pinned."""
        ...

    def fetch(self, copy: Callable[[], None], after: WorkMark) -> None:
        """Runs ``copy``, which queues copies to the host, behind ``after``; returns when they are done. Any thread."""
        ...

    def bring(self, copy: Callable[[], None], after: WorkMark) -> None:
        """Runs ``copy``, which queues copies from :meth:`host_memory`, behind ``after``, and waits for nothing."""
        ...

    def join(self) -> None:
        """What the engine queues next comes behind all that was brought; call it in the engine's thread."""
        ...


class CudaCopyQueue:
    """Two streams of their own, so that neither direction waits for the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgoing, self._incoming = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> WorkMark:
        return torch.cuda.current_stream(self._device).record_event()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        # Torch keeps pinned memory for the next who asks, and gives none away that a queued copy still reads.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, copy: Callable[[], None], after: WorkMark) -> None:
        with torch.cuda.stream(self._outgoing):
            self._outgoing.wait_event(after)
            copy()
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps instead of spinning
            done.record(self._outgoing)
        done.synchronize()

    def bring(self, copy: Callable[[], None], after: WorkMark) -> None:
        with torch.cuda.stream(self._incoming):
            self._incoming.wait_event(after)
            copy()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._incoming)


def copy_queue_for(device: torch.device) -> CopyQueue | None:
    """None where the cache is in the host's memory."""
    return CudaCopyQueue(device) if device.type == "cuda" else None

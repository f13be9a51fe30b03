"""A NIXL agent whose reads are controlled by a test."""

from __future__ import annotations

from typing import Any

from baton.kv_transfer.payload.nixl_agent import NixlAgent, ReadState


class SlowAgent(NixlAgent):
    """An agent whose reads a test can delay or make fail.

    Attributes:
        as_if: the reported state of reads, if it differs from the real one.
        can_release: whether reads can be released.
        most_bytes: maximum number of bytes that can be registered at once.
        num_looks: number of queries of a read's state.
        met: descriptions of other agents.
    """

    def __init__(self, *, serves: bool = False) -> None:
        super().__init__(serves=serves)
        self.as_if: ReadState | None = None
        self.can_release = True
        self.most_bytes = 1 << 30
        self.num_registered = 0
        self.num_forgotten = 0
        self.num_looks = 0
        self.met: list[bytes] = []
        self.stuck: set[int] = set()
        self.sticks = False

    def meet(self, description: bytes) -> str:
        self.met.append(description)
        return super().meet(description)

    def begin_read(self, name: str, source: int, target: int, num_bytes: int) -> int:
        handle = super().begin_read(name, source, target, num_bytes)
        if self.sticks:
            self.stuck, self.sticks = {handle}, False
        return handle

    def state(self, handle: int) -> ReadState:
        self.num_looks += 1
        state = super().state(handle)
        return ReadState.UNDER_WAY if handle in self.stuck else self.as_if or state

    def release(self, handle: int) -> None:
        if not self.can_release:
            raise RuntimeError("the transfer is under way")
        super().release(handle)

    def register(self, memory: memoryview) -> Any:
        if len(memory) > self.most_bytes:
            raise RuntimeError("too much locked memory")
        self.num_registered += 1
        return super().register(memory)

    def deregister(self, region: Any) -> None:
        self.num_registered -= 1
        super().deregister(region)

    def forget(self, name: str) -> None:
        self.num_forgotten += 1
        super().forget(name)

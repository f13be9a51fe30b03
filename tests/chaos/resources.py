"""What the processes of a cluster hold: memory, open files, and objects in shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

_PERIOD_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is there at a moment without load.

    Attributes:
        num_files: the open files of each process.
        shared: names of this machine's objects in shared memory.
    """

    num_files: Mapping[psutil.Process, int]
    shared: frozenset[str]

    @classmethod
    def of(cls, pids: Sequence[int]) -> Holdings:
        """What these processes hold, and what this machine has in shared memory."""
        num_files = {}
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                num_files[process] = process.num_fds()
        return cls(num_files, frozenset(os.listdir(_SHARED_MEMORY)))

    def excess(self, before: Holdings) -> dict[str, int]:
        """What is there in addition to ``before``; files only of processes that were there before."""
        lasting = self.num_files.keys() & before.num_files.keys()
        return {
            "processes": len(self.num_files) - len(before.num_files),
            "files in lasting processes": sum(self.num_files[each] - before.num_files[each] for each in lasting),
            "objects in shared memory": len(self.shared) - len(before.shared),
        }


@dataclass(frozen=True, slots=True)
class Growth:
    """How the memory of a process that lived all the time has changed, from the first third of it to the last."""

    name: str
    before_bytes: float
    after_bytes: float

    @property
    def share(self) -> float:
        return self.after_bytes / self.before_bytes - 1


@dataclass
class MemoryWatch:
    """Records the memory of processes.

    Args:
        pids: the processes of a cluster, which change.
        warm_up_s: how long to wait before the first record.
    """

    pids: Callable[[], Sequence[int]]
    warm_up_s: float
    _records: dict[psutil.Process, list[int]] = field(default_factory=dict)
    _num_rounds: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Records until ``stop`` is set."""
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), self.warm_up_s)
        while not stop.is_set():
            await asyncio.to_thread(self._record)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _PERIOD_S)

    def growths(self) -> list[Growth]:
        """Of all processes that were there from the first record to the last, by size."""
        third = self._num_rounds // 3
        lasting = [(process, sizes) for process, sizes in self._records.items() if len(sizes) == self._num_rounds]
        found = [
            Growth(_name(process), median(sizes[:third]), median(sizes[-third:])) for process, sizes in lasting if third
        ]
        return sorted(found, key=lambda growth: -growth.after_bytes)

    def _record(self) -> None:
        self._num_rounds += 1
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                memory = process.memory_info()
                self._records.setdefault(process, []).append(memory.rss - memory.shared)


def _name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return "ended"
    return " ".join(Path(word).name for word in words[:4])[:60]

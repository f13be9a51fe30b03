"""What the processes of a cluster hold: memory, open files, and objects in shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

_PERIOD_S = 5.0
_OWN = ("ray::RouterActor", "ray::Controller", "ray::WorkerActor")
_LOG_READER = "log_monitor.py"
"""Ray's reader of logs keeps the files of some hundred ended processes open."""
_NODE = "raylet"
_SHARED_MEMORY = Path("/dev/shm")
_MAX_SAMPLES = 60
"""Of the memory of each process, in a report."""


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
        """What is there in addition to ``before``; files by process, only of those that were there before.

        Those of Ray's nodes are one sum, since each has some for every worker there, and workers change nodes.
        """
        files: dict[str, int] = {}
        for process in self.num_files.keys() & before.num_files.keys():
            name = _name(process)
            if _LOG_READER not in name:
                holder = f"all {_NODE}s" if name.startswith(_NODE) else f"{name} ({process.pid})"
                change = self.num_files[process] - before.num_files[process]
                files[holder] = files.get(holder, 0) + change
        return {
            "processes": len(self.num_files) - len(before.num_files),
            "objects in shared memory": len(self.shared) - len(before.shared),
            **{f"files in {holder}": change for holder, change in files.items()},
        }


@dataclass(frozen=True, slots=True)
class Growth:
    """How the memory of processes that lived all the time has changed, from the first third of it to the last.

    Attributes:
        samples: some of the records, in bytes and evenly spaced, which show when it grew.
    """

    name: str
    before_bytes: float
    after_bytes: float
    samples: Sequence[int] = ()

    @property
    def percent(self) -> float:
        return 100 * (self.after_bytes / self.before_bytes - 1)

    @property
    def is_own(self) -> bool:
        """Whether this is a process of baton rather than Ray's, or all of them."""
        return self.name == "all" or self.name.startswith(_OWN)


@dataclass
class MemoryWatch:
    """Records the memory of processes, without the content of KV caches.

    Linux gives a KV cache its memory page by page, when a block is used for the first time. That takes longer than a
    short run.

    Args:
        pids: the processes of a cluster, which change.
        kv_bytes: the sizes of the contents of KV caches, by process id.
        warm_up_s: how long to wait before the first record.
    """

    pids: Callable[[], Sequence[int]]
    kv_bytes: Callable[[], Awaitable[Mapping[int, int]]]
    warm_up_s: float
    _records: dict[psutil.Process, list[int]] = field(default_factory=dict)
    _num_rounds: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Records until ``stop`` is set."""
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), self.warm_up_s)
        while not stop.is_set():
            kv_bytes = await self.kv_bytes()
            await asyncio.to_thread(self._record, kv_bytes)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _PERIOD_S)

    @property
    def seconds(self) -> float:
        """How long it has recorded, about."""
        return self._num_rounds * _PERIOD_S

    def growths(self) -> list[Growth]:
        """Of each process that was there from the first record to the last, by size, after that of all of them."""
        third = self._num_rounds // 3
        lasting = [(process, sizes) for process, sizes in self._records.items() if len(sizes) == self._num_rounds]
        found = [
            Growth(
                _name(process), median(sizes[:third]), median(sizes[-third:]), sizes[:: -(-len(sizes) // _MAX_SAMPLES)]
            )
            for process, sizes in lasting
            if third
        ]
        whole = Growth("all", sum(each.before_bytes for each in found), sum(each.after_bytes for each in found))
        return [whole, *sorted(found, key=lambda growth: -growth.after_bytes)] if found else []

    def _record(self, kv_bytes: Mapping[int, int]) -> None:
        self._num_rounds += 1
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                memory = process.memory_info()
                own = memory.rss - memory.shared - kv_bytes.get(pid, 0)
                self._records.setdefault(process, []).append(own)


def _name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return "ended"
    return " ".join(Path(word).name for word in words[:3])[:60].strip()

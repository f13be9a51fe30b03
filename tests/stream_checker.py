"""A fake device that runs the operations of its streams in any legal order, and reports missing synchronisation.

    host        launch a    launch b    record e            launch d, after e          wait for d
    stream 0    a ───────── b ───────── e
    stream 1                                  (waits for e) ── d
                each of them runs at a random time, at the latest when the host waits for it

An operation runs after the earlier ones of its stream and after the events for which the stream waits. If two
operations touch the same row of an allocation, and at least one writes, they must be ordered by streams, events or a
wait of the host; otherwise :attr:`Device.faults` names both places, in every schedule. Operations on tensors come from
:mod:`tests.device_tensors`.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_ROOT = Path(__file__).parent.parent
_OWN_FILES = frozenset(
    str(Path(__file__).parent / name) for name in ("stream_checker.py", "device_tensors.py", "fake_cuda.py")
)

Clock: TypeAlias = dict[int, int]
"""The number of operations of each stream that have certainly happened."""
Rows: TypeAlias = slice | npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Operation:
    """An operation in a stream.

    Attributes:
        tick: number in its stream, from 1.
        clock: the operations that happen before it, including itself.
        waits: operations of other streams that must run before.
        run: executes it and returns the accesses; ``None`` once it has run.
    """

    name: str
    where: str
    stream: int
    tick: int
    clock: Clock
    waits: tuple[Operation, ...]
    run: Callable[[], Sequence[Access]] | None

    @property
    def is_done(self) -> bool:
        return self.run is None

    def __str__(self) -> str:
        return f"{self.name} in stream {self.stream} ({self.where})"


@dataclass(slots=True)
class Access:
    memory: Memory
    rows: Rows
    writes: bool


class Memory:
    """One allocation, and the numbers of the operations that last touched each of its rows; 0 for none.

    Attributes:
        users: further streams that use the allocation, as far as its allocator knows.
    """

    def __init__(self, num_bytes: int, row_bytes: int) -> None:
        self.row_bytes = max(1, row_bytes)
        self.num_rows = -(-num_bytes // self.row_bytes)
        self.users: set[int] = set()
        self.written = np.zeros(self.num_rows, dtype=np.int64)
        self.read_by: dict[int, npt.NDArray[np.int64]] = {}

    def all_rows(self, *, writes: bool) -> Access:
        return Access(self, slice(0, self.num_rows), writes)


@dataclass(slots=True)
class Schedule:
    """The randomness of the order.

    Attributes:
        chance: the random numbers.
        eagerness: by stream, the probability that its next operation runs when the host launches something; the last
            entry applies to all further streams.
        wandering: the probability that an unneeded operation runs while the host waits.
    """

    chance: random.Random
    eagerness: Sequence[float] = (0.5,)
    wandering: float = 0.5

    @classmethod
    def latest(cls) -> Schedule:
        """A schedule in which operations run only when the host waits for them."""
        return cls(random.Random(0), (0.0,), 0.0)


@dataclass(eq=False, slots=True)
class _Queue:
    waiting: deque[Operation] = field(default_factory=deque)
    num_ticks: int = 0
    clock: Clock = field(default_factory=dict)


class Device:
    """The fake device.

    Attributes:
        faults: unordered accesses, and operations that failed.
        num_operations: number of operations that have run.
        on_wait: called when a thread begins to wait for the device.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.on_wait: Callable[[], None] = lambda: None
        self.faults: list[str] = []
        self._schedule = schedule
        self._queues = [_Queue()]
        self._host: Clock = {}
        self._ran: list[Operation] = [Operation("nothing", "", 0, 0, {}, (), None)]
        self._freed: deque[tuple[Memory, int, Callable[[], None] | None]] = deque()
        self._unusable: list[tuple[Memory, int, Callable[[], None] | None, list[Operation]]] = []
        self._tape: list[tuple[str, Callable[[], Sequence[Access]]]] | None = None
        self._lock = threading.RLock()
        self._local = threading.local()

    @property
    def num_operations(self) -> int:
        return len(self._ran) - 1

    @property
    def num_streams(self) -> int:
        return len(self._queues)

    @property
    def current(self) -> int:
        """This thread's stream."""
        stream: int = getattr(self._local, "stream", 0)
        return stream

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        before, self._local.stream = self.current, number
        try:
            yield
        finally:
            self._local.stream = before

    def new_stream(self) -> int:
        self._queues.append(_Queue())
        return len(self._queues) - 1

    def launch(self, name: str, run: Callable[[], Sequence[Access]], waits: Sequence[Operation] = ()) -> Operation:
        """Queues an operation in the current stream."""
        with self._lock:
            self._reuse_freed()
            if self._tape is not None:
                self._tape.append((name, run))
                return self._ran[0]
            operation = self._queue(self.current, name, run, waits)
            self._run_some()
            return operation

    def record(self, launch_all: Callable[[], None]) -> Callable[[], None]:
        """Records launches like a CUDA graph: they run whenever the returned function is called.

        Raises:
            RuntimeError: the host waits during the recording.
        """
        tape: list[tuple[str, Callable[[], Sequence[Access]]]] = []
        self._tape = tape
        try:
            launch_all()
        finally:
            self._tape = None

        def replay() -> None:
            for name, run in tape:
                self.launch(name, run)

        return replay

    def discard(self) -> None:
        """Does nothing, since recordings share no memory; see :class:`baton.engine.runner.graph_recorder.Recorder`."""

    def mark(self, stream: int) -> Operation:
        """A mark that is done when all present operations of the stream are done."""
        with self._lock:
            self._reuse_freed()
            return self._queue(stream, "event", list)

    def wait_in(self, stream: int, mark: Operation) -> None:
        """Makes later operations of the stream run after the mark."""
        with self._lock:
            self._queue(stream, "wait", list, (mark,))

    def is_done(self, mark: Operation) -> bool:
        """Whether the mark is done; if so, later accesses of the host are ordered after it."""
        with self._lock:
            self._run_some()
            if mark.is_done:
                _merge(self._host, mark.clock)
            return mark.is_done

    def wait(self, mark: Operation) -> None:
        """Makes the host wait for a mark."""
        if not mark.is_done:
            self.on_wait()
        with self._lock:
            if self._tape is not None:
                raise RuntimeError("the host cannot wait for what a stream is given while it is recorded")
            while not mark.is_done:
                ready = self._ready()
                if self._schedule.chance.random() < self._schedule.wandering:
                    self._run(self._schedule.chance.choice(ready))
                else:
                    self._run(self._needed(mark))
            _merge(self._host, mark.clock)

    def synchronize(self, stream: int | None = None) -> None:
        for number in range(self.num_streams) if stream is None else (stream,):
            self.wait(self.mark(number))

    def free(self, memory: Memory, stream: int, overwrite: Callable[[], None] | None, *, pinned: bool) -> None:
        """Lets the memory be reused, as by torch's allocators: at once by the stream that it was allocated for, else
        once the known user streams are done. May be called by a garbage collector.

        Args:
            overwrite: overwrites the memory, as its next owner would.
            pinned: whether the host instead of the stream overwrites it.
        """
        self._freed.append((memory, -1 if pinned else stream, overwrite))

    def check(self) -> None:
        """Runs all remaining operations.

        Raises:
            AssertionError: there are faults.
        """
        self.synchronize()
        if self.faults:
            raise AssertionError("\n".join(self.faults))

    def _reuse_freed(self) -> None:
        while self._freed:
            memory, stream, overwrite = self._freed.popleft()
            marks = [self._queue(user, "event", list) for user in sorted(memory.users)]
            self._unusable.append((memory, stream, overwrite, marks))
        left = []
        for entry in self._unusable:
            memory, stream, overwrite, marks = entry
            if not all(mark.is_done for mark in marks):
                left.append(entry)
                continue
            for mark in marks:
                _merge(self._host, mark.clock)
            if stream < 0:
                overwrite()
            else:
                self._queue(stream, "memory reused", _overwriting(memory, overwrite))
        self._unusable = left

    def _queue(
        self, stream: int, name: str, run: Callable[[], Sequence[Access]], waits: Sequence[Operation] = ()
    ) -> Operation:
        queue = self._queues[stream]
        queue.num_ticks += 1
        _merge(queue.clock, self._host)
        for mark in waits:
            _merge(queue.clock, mark.clock)
        queue.clock[stream] = queue.num_ticks
        operation = Operation(name, _place(), stream, queue.num_ticks, dict(queue.clock), tuple(waits), run)
        queue.waiting.append(operation)
        return operation

    def _ready(self) -> list[Operation]:
        heads = [queue.waiting[0] for queue in self._queues if queue.waiting]
        return [head for head in heads if all(mark.is_done for mark in head.waits)]

    def _needed(self, mark: Operation) -> Operation:
        """The operation to run next for the mark to be reached."""
        head = self._queues[mark.stream].waiting[0]
        due = next((each for each in head.waits if not each.is_done), None)
        return head if due is None else self._needed(due)

    def _run_some(self) -> None:
        eagerness = self._schedule.eagerness
        for head in self._ready():
            if self._schedule.chance.random() < eagerness[min(head.stream, len(eagerness) - 1)]:
                self._run(head)

    def _run(self, operation: Operation) -> None:
        self._queues[operation.stream].waiting.popleft()
        run, operation.run = operation.run, None
        try:
            accesses = run()
        except Exception as error:  # noqa: BLE001 - as on a device, the caller that launched it is not told
            self.faults.append(f"{operation} failed: {type(error).__name__}: {error}")
            return
        number = len(self._ran)
        self._ran.append(operation)
        for access in accesses:
            self._touch(operation, number, access)

    def _touch(self, operation: Operation, number: int, access: Access) -> None:
        memory, rows = access.memory, access.rows
        tables = {"written by": [memory.written]}
        if access.writes:
            tables["read by"] = list(memory.read_by.values())
        for deed, known in tables.items():
            for earlier in {each for table in known for each in table[rows].tolist()}:
                other = self._ran[earlier]
                if operation.clock.get(other.stream, 0) < other.tick:
                    does = "writes" if access.writes else "reads"
                    fault = f"{operation} {does} what was {deed} {other}, and nothing orders the two"
                    if fault not in self.faults:
                        self.faults.append(fault)
        if access.writes:
            memory.written[rows] = number
        else:
            memory.read_by.setdefault(operation.stream, np.zeros(memory.num_rows, dtype=np.int64))[rows] = number


def _overwriting(memory: Memory, overwrite: Callable[[], None]) -> Callable[[], Sequence[Access]]:
    def run() -> Sequence[Access]:
        overwrite()
        return [memory.all_rows(writes=True)]

    return run


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _place() -> str:
    """File and line of the two innermost calls in this repository."""
    places: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < 2:
        if (name := _name_here(frame.f_code.co_filename)) is not None:
            places.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " called from ".join(places)


@functools.cache
def _name_here(path: str) -> str | None:
    """A file's path in this repository; ``None`` for other files, and for those that all operations pass through."""
    name = Path(path)
    if path in _OWN_FILES or "site-packages" in path or not name.is_relative_to(_ROOT):
        return None
    return str(name.relative_to(_ROOT))

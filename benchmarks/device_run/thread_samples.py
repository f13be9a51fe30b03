"""A sampling profiler for one thread."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from benchmarks.device_run.part import Row

_INTERVAL_S = 0.002
_MAX_ROWS = 25
_SHOWN = 3
ROOT = str(Path(__file__).resolve().parents[2])
_INSTALLED = "site-packages"
"""Packages may be installed below the project's folder."""


class ThreadSampler:
    """Samples the thread with this name while a block runs, about 500 times per second.

    Calls to functions outside of the project count for the calling function of the project.
    """

    def __init__(self, thread_name: str) -> None:
        self._thread_name = thread_name
        self._counts: Counter[str] = Counter()
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="sampler", daemon=True)

    def __enter__(self) -> ThreadSampler:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._sampler.join()

    def rows(self, of: str) -> Iterator[Row]:
        """Yields the most frequent innermost functions of the project; all but a few are hidden from the table."""
        total = sum(self._counts.values())
        for place, (name, count) in enumerate(self._counts.most_common(_MAX_ROWS)):
            row = {"name": f"{of}: {name}", "share": count / total}
            yield {**row, "hidden": True} if place >= _SHOWN else row

    def _sample(self) -> None:
        while not self._done.wait(_INTERVAL_S):
            ident = next((each.ident for each in threading.enumerate() if each.name == self._thread_name), None)
            frame = None if ident is None else sys._current_frames().get(ident)
            if frame is not None:
                self._counts[_own_function(frame)] += 1


def _own_function(frame: FrameType) -> str:
    at: FrameType | None = frame
    while at is not None and not is_own(at.f_code.co_filename):
        at = at.f_back
    code = (at or frame).f_code
    return f"{Path(code.co_filename).name} {code.co_qualname}"


def is_own(file: str) -> bool:
    """Whether a source file is the project's."""
    return file.startswith(ROOT) and _INSTALLED not in file

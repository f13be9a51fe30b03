"""Finds where the threads of a process hang, from the stacks that :mod:`faulthandler` wrote to a log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.device_run.thread_samples import ROOT, is_own

_MAX_LINES, _MAX_THREAD_LINES = 12, 3
_MAX_LOGGED = 8
_BEGIN = re.compile(r"(Current thread|Thread) 0x.*most recent call first")
_CALL = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_FATAL = "Fatal Python error"
_WAITING = frozenset(
    ("wait", "_wait_for_tstate_lock", "join", "acquire", "get", "select", "poll", "accept", "_worker", "_recv")
)
"""Library functions in which idle threads wait."""


@dataclass(slots=True)
class _Stack:
    """The calls of one thread, the innermost first.

    Attributes:
        crashed: whether this thread crashed the process.
    """

    crashed: bool
    title: str
    calls: list[tuple[str, int, str]] = field(default_factory=list)

    def rank(self) -> tuple[bool, ...]:
        """The sort key of threads: crashed first, then those in the project's functions, busy ones, the engine's."""
        own = self._own()
        waits = bool(self.calls) and not is_own(self.calls[0][0]) and self.calls[0][2] in _WAITING
        is_engine = "engine" in self.title or any(file.startswith(f"{ROOT}/baton/engine/") for file, _, _ in own)
        return (not self.crashed, not own, waits, not is_engine)

    def lines(self) -> Iterator[str]:
        """Yields the innermost calls of the project's functions, or of the libraries if there are none."""
        for number, (file, line, function) in enumerate((self._own() or self.calls)[:_MAX_THREAD_LINES]):
            yield f"{'called by' if number else 'thread in'} {function}, {file.removeprefix(ROOT + '/')}:{line}"

    def _own(self) -> list[tuple[str, int, str]]:
        return [call for call in self.calls if is_own(call[0])]


def telling_lines(log: Sequence[str]) -> list[str]:
    """The most informative lines of a log: the innermost calls of each thread if it has stacks, else its last lines."""
    fatal = [line for line in log if line.startswith(_FATAL)]
    stacks: list[_Stack] = []
    for line in log:
        if _BEGIN.match(line):
            stacks.append(_Stack(bool(fatal) and line.startswith("Current"), line))
        elif stacks and (call := _CALL.match(line)):
            stacks[-1].calls.append((call["file"], int(call["line"]), call["function"]))
    if not stacks:
        return list(log[-_MAX_LOGGED:])
    stacks.sort(key=_Stack.rank)
    return [*fatal[-1:], *(line for stack in stacks for line in stack.lines())][:_MAX_LINES]

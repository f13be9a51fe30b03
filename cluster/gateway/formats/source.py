"""The text of a growing output, for parsers that must not depend on the pieces in which it arrives."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

E = TypeVar("E")
Wait = Generator[None, None, E]
"""A step that yields ``None`` while it needs more text, and returns its result."""


class Source:
    """Unread text and its end. Methods that need text that has not arrived are generators; they yield ``None`` for it.

    Their results are a function of the whole output and never of its cuts.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_ended = False
        self._taken: list[str] | None = None
        self.in_reasoning = False
        """Whether the text that is read next is reasoning."""
        self.cut_by: str | None = None
        """See :meth:`end`."""

    def feed(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self, cut_by: str | None = None) -> None:
        """No text follows.

        Args:
            cut_by: the stop string that ended the text, or an empty string if the bound of tokens did. ``None``: the
                model ended it.
        """
        self._is_ended = True
        self.cut_by = cut_by

    @property
    def unread(self) -> str:
        return self._text[self._position :]

    def take(self, num_chars: int) -> str:
        """Reads characters that have arrived."""
        piece = self._text[self._position : self._position + num_chars]
        self._position += len(piece)
        if self._taken is not None:
            self._taken.append(piece)
        return piece

    def mark(self) -> None:
        """Remembers what is read from here on."""
        self._taken = []

    @property
    def is_marked(self) -> bool:
        """Whether what is being read may turn out to be something else."""
        return self._taken is not None

    def since_mark(self) -> str:
        """Returns what was read since the mark, and removes the mark."""
        taken, self._taken = "".join(self._taken or ()), None
        return taken

    def rewind(self) -> None:
        """Goes back to the mark and removes it."""
        self._text, self._position = self.since_mark() + self.unread, 0

    def at_end(self) -> Wait[bool]:
        """Whether no text is left."""
        while self._position == len(self._text):
            if self._is_ended:
                return True
            yield None
        return False

    def skip(self, literal: str) -> Wait[bool]:
        """Reads ``literal`` if it comes next; otherwise reads nothing and returns false."""
        while len(unread := self.unread) < len(literal) and literal.startswith(unread) and not self._is_ended:
            yield None
        if not unread.startswith(literal):
            return False
        self.take(len(literal))
        return True

    def skip_cut(self, *marks: str, or_whole: bool = True) -> Wait[bool]:
        """Reads the rest of the output if it is the beginning of a mark, and returns whether it is.

        Args:
            or_whole: also if it is a mark and white space.
        """

        def is_cut(unread: str, mark: str) -> bool:
            return (
                mark.startswith(unread.rstrip() or unread) if or_whole else mark != unread and mark.startswith(unread)
            )

        while (unread := self.unread) and any(is_cut(unread, mark) for mark in marks):
            if self._is_ended:
                self.take(len(unread))
                return True
            yield None
        return False

    def take_while(self, accepts: Callable[[str], bool]) -> Wait[str]:
        """Reads the characters that ``accepts`` allows."""
        found: list[str] = []
        while not (yield from self.at_end()):
            unread = self.unread
            count = next((index for index, char in enumerate(unread) if not accepts(char)), len(unread))
            found.append(self.take(count))
            if count < len(unread):
                break
        return "".join(found)

    def skip_space(self) -> Wait[str]:
        return (yield from self.take_while(str.isspace))

    def until(
        self, markers: Sequence[str], make: Callable[[str], E], *, trims: bool = True
    ) -> Generator[E | None, None, str | None]:
        """Yields the text before the first of ``markers`` in pieces, and returns the marker, which is not read.

        Args:
            make: makes what is yielded of each piece.
            trims: white space before the marker is not yielded, and not read either.

        Returns:
            ``None`` if there is no marker; then all text was read.
        """
        while True:
            unread = self.unread
            found = min(((unread.find(marker), marker) for marker in markers if marker in unread), default=None)
            if found is None and self._is_ended:
                end = len(unread)
            else:
                end = len(unread) - _held(unread, markers) if found is None else found[0]
                if trims:
                    end = len(unread[:end].rstrip())
            if end:
                yield make(self.take(end))
            if found is not None or self._is_ended:
                return None if found is None else found[1]
            yield None

    def json_value(self, make: Callable[[str], E]) -> Generator[E | None, None, bool]:
        """Yields the text of one JSON object, array or string in pieces.

        Returns:
            Whether it is valid. If not, reading stopped where that became certain, and all that was read was yielded.
        """
        tracker, pieces = _JsonTracker(), [""]
        while not (yield from self.at_end()):
            count, is_valid = tracker.push(self.unread)
            if count:
                pieces.append(self.take(count))
                yield make(pieces[-1])
            if not is_valid:
                return False
            if tracker.is_complete:
                return _is_json("".join(pieces))
        return False


def _held(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


_CLOSERS = {"{": "}", "[": "]"}
_PLAIN = frozenset(" \t\r\n0123456789+-.eEtrufalsn:,")


class _JsonTracker:
    """Finds the end of a JSON value, and most errors before it."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def push(self, text: str) -> tuple[int, bool]:
        """Returns how many characters belong to the value, and whether it can still be valid."""
        for index, char in enumerate(text):
            if not self._accepts(char):
                return index, False
            if not self._open and not self._in_string:
                self.is_complete = True
                return index + 1, True
        return len(text), True

    def _accepts(self, char: str) -> bool:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            else:
                self._in_string = char != '"'
            return char >= " "
        if char == '"':
            self._in_string = True
        elif char in _CLOSERS:
            self._open.append(_CLOSERS[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
        else:
            return bool(self._open) and char in _PLAIN
        return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=len)  # Python reads no integer of more than 4,300 digits
    except (ValueError, RecursionError):
        return False
    return True

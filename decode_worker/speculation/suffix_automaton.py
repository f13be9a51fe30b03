"""A suffix automaton over tokens: every repetition in a sequence, found online in amortised constant time per token.

Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985. Each state stands for a set of
substrings with the same occurrences; its suffix link leads to the longest one that occurs elsewhere as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_ROOT = 0
# Number of suffix links along which a new occurrence is noted. Shorter substrings keep an older, equally valid one.
_MAX_NOTED_LINKS = 16


@dataclass(frozen=True, slots=True)
class Match:
    """An occurrence of the latest tokens.

    Attributes:
        length: number of tokens that agree.
        end: position of the last of them in the automaton's sequence.
    """

    length: int
    end: int


class SuffixAutomaton:
    """Grows token by token. Positions count from 0."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]
        self._last = _ROOT
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self._append(token)

    def repetition(self) -> Match:
        """The longest end of the sequence that occurred before, and its most recent earlier occurrence."""
        state = self._link[self._last]
        return Match(0, -1) if state <= _ROOT else Match(self._length[state], self._end[state])

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """One step of matching another sequence against this one.

        Args:
            state, matched: what the previous step returned; (0, 0) at the beginning.

        Returns:
            The new state, and the length of the longest end of the other sequence that occurs in this one.
        """
        # A state may have been split since the last step; its shorter substrings then moved up the link.
        while state != _ROOT and self._length[self._link[state]] >= matched:
            state = self._link[state]
        while state != _ROOT and token not in self._next[state]:
            state = self._link[state]
            matched = self._length[state]
        target = self._next[state].get(token)
        return (_ROOT, 0) if target is None else (target, matched + 1)

    def occurrence(self, state: int, matched: int) -> Match:
        """An occurrence of the text that led to ``state``."""
        return Match(matched, self._end[state])

    def _append(self, token: int) -> None:
        self._note_last_occurrence()
        following, links = self._next, self._link
        position = len(self.token_ids)
        self.token_ids.append(token)
        current = self._add_state({}, _ROOT, self._length[self._last] + 1, position)
        state = self._last
        while state != -1 and token not in (own := following[state]):
            own[token] = current
            state = links[state]
        if state != -1:
            links[current] = self._split(state, token)
        self._last = current

    def _split(self, state: int, token: int) -> int:
        """The state for ``state`` followed by ``token``, cloned from a longer one if necessary."""
        target = self._next[state][token]
        if self._length[state] + 1 == self._length[target]:
            return target
        clone = self._add_state(
            dict(self._next[target]), self._link[target], self._length[state] + 1, self._end[target]
        )
        walker = state
        while walker != -1 and self._next[walker].get(token) == target:
            self._next[walker][token] = clone
            walker = self._link[walker]
        self._link[target] = clone
        return clone

    def _add_state(self, transitions: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1

    def _note_last_occurrence(self) -> None:
        """Notes the last occurrence. Called just before the next token, so that links lead to *earlier* occurrences."""
        position = len(self.token_ids) - 1
        state = self._link[self._last]
        for _ in range(_MAX_NOTED_LINKS):
            if state <= _ROOT:
                return
            self._end[state] = position
            state = self._link[state]


def continuation(token_ids: list[int], match: Match, count: int) -> tuple[int, ...]:
    """``count`` tokens that followed the match, or fewer.

    A match that reaches the end of its own sequence is a period, which is repeated.
    """
    start = match.end + 1
    found = token_ids[start : start + count]
    period = len(token_ids) - start
    while found and len(found) < count and period > 0:
        found.append(found[len(found) - period])
    return tuple(found)

"""Rounds: what each step of a traced answer drafted, and what the target said of it. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

MAX_ROUNDS = 512
"""Rounds of one answer that are kept; later ones are only counted."""
MAX_NODES = 64
"""Highest number of drafted tokens in one step of a sequence."""


class Verdict(StrEnum):
    """Where a token of the answer came from."""

    ACCEPTED = "accepted"
    """It was drafted, and the target agreed."""
    RECOVERED = "recovered"
    """The target's own token, where it agreed with no draft."""
    BONUS = "bonus"
    """The target's own token behind a draft that it accepted to the end."""
    PLAIN = "plain"
    """The target's own token in a round without a draft."""


@dataclass(frozen=True, slots=True)
class Round:
    """A step that gave an answer new tokens.

    Attributes:
        token_ids: the new tokens.
        method: the speculation method that drafted; empty without a draft.
        draft: the drafted tokens that were verified, one per node; parents come before children.
        parents: index of each node's parent in ``draft``, or -1 if nothing was drafted before it.
        accepted: the nodes that the target agreed with, a path from above. If the answer ends within them, the last
            ones are not in ``token_ids``.
        draft_s: time that the step spent on drafting, for all of its sequences.
        verify_s: the rest of the step's time.
        num_sequences: sequences in the step, this one included.
    """

    token_ids: tuple[int, ...]
    method: str = ""
    draft: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_sequences: int = 1

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One for each of ``token_ids``."""
        if not self.draft:
            own = Verdict.PLAIN
        elif self.accepted and self.accepted[-1] not in self.parents:
            own = Verdict.BONUS
        else:
            own = Verdict.RECOVERED
        return (*(Verdict.ACCEPTED for _ in self.accepted), own)[: len(self.token_ids)]

    def to_dict(self) -> dict[str, object]:
        """Returns a JSON-ready dict; see ``docs/api.md``."""
        accepted = set(self.accepted)
        return {
            "method": self.method or None,
            "draft": {
                "token_ids": list(self.draft),
                "parents": list(self.parents),
                "accepted": [node in accepted for node in range(len(self.draft))],
            },
            "output": {"token_ids": list(self.token_ids), "verdicts": [str(verdict) for verdict in self.verdicts]},
            "draft_ms": round(self.draft_s * 1e3, 3),
            "verify_ms": round(self.verify_s * 1e3, 3),
            "batch_sequences": self.num_sequences,
        }


class RoundLog:
    """The first rounds of one answer, stored as numbers: some 200 bytes for a round with 16 drafted tokens.

    Attributes:
        num_left_out: rounds after the first ``limit``.
    """

    __slots__ = ("_limit", "_methods", "_numbers", "_times_s", "num_left_out")

    def __init__(self, limit: int = MAX_ROUNDS) -> None:
        self._limit = limit
        self._methods: list[str] = []
        self._numbers = array("I")
        self._times_s = array("d")
        self.num_left_out = 0

    def __len__(self) -> int:
        """The number of rounds that are kept."""
        return len(self._times_s) // 2

    @property
    def num_numbers(self) -> int:
        """How many numbers it stores: about two for each drafted token, and one for each token of the answer."""
        return len(self._numbers)

    def add(self, one: Round) -> None:
        """Adds the answer's next round."""
        if len(self) >= self._limit:
            self.num_left_out += 1
            return
        if one.method not in self._methods:
            self._methods.append(one.method)
        self._times_s.extend((one.draft_s, one.verify_s))
        counts = len(one.token_ids), len(one.draft), len(one.accepted)
        self._numbers.extend((self._methods.index(one.method), one.num_sequences, *counts))
        self._numbers.extend((*one.token_ids, *one.draft, *(parent + 1 for parent in one.parents), *one.accepted))

    def __iter__(self) -> Iterator[Round]:
        """Iterates over the rounds that are kept."""
        numbers = iter(self._numbers)

        def take(count: int) -> tuple[int, ...]:
            return tuple(islice(numbers, count))

        for index in range(len(self)):
            method, num_sequences, num_tokens, num_nodes, num_accepted = take(5)
            yield Round(
                take(num_tokens),
                self._methods[method],
                take(num_nodes),
                tuple(number - 1 for number in take(num_nodes)),
                take(num_accepted),
                self._times_s[2 * index],
                self._times_s[2 * index + 1],
                num_sequences,
            )

    def to_dict(self) -> dict[str, object]:
        """Returns a JSON-ready dict; see ``docs/api.md``."""
        return {"rounds": [one.to_dict() for one in self], "left_out": self.num_left_out}

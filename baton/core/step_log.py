"""The router's bounded record of one sequence's engine steps, stored as columns of numbers. No torch here."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import NamedTuple

MAX_STEPS = 256
MAX_SLOWEST = 8
MAX_RUNS = 16
"""Runs of steps behind the limit; an answer that changes workers has two or three for each of them."""


class StepRow(NamedTuple):
    """One step, or several merged steps, on the router's monotonic clock. All fields are floats, as they are stored.

    Attributes:
        step_index: the engine's number of the (last) step.
        busy_s: time spent in the step.
        draft_s: part of ``busy_s`` spent on guessing tokens.
        num_computed: known tokens of this sequence that were computed; more than one in prefill and recomputation.
        num_emitted: new tokens.
        num_sequences, num_batch_tokens, num_prompt_tokens: counts of the whole step, see
            :class:`baton.core.steps.EngineStep`.
        received_s: when the router received the tokens.
        first_token: index of the first new token among the sequence's output tokens, from 0.
        gap_s: time between the tokens before and these.
    """

    step_index: float
    started_s: float
    ended_s: float
    busy_s: float
    draft_s: float
    num_steps: float
    num_computed: float
    num_emitted: float
    num_drafted: float
    num_accepted: float
    num_sequences: float
    num_batch_tokens: float
    num_prompt_tokens: float
    received_s: float
    first_token: float
    gap_s: float

    @property
    def recomputes(self) -> bool:
        """True when the step computed tokens that were already known, besides or instead of a new one."""
        return self.num_computed > self.num_steps or self.num_emitted == 0

    def merged_with(self, later: StepRow) -> StepRow:
        return StepRow(
            later.step_index,
            self.started_s,
            later.ended_s,
            self.busy_s + later.busy_s,
            self.draft_s + later.draft_s,
            self.num_steps + later.num_steps,
            self.num_computed + later.num_computed,
            self.num_emitted + later.num_emitted,
            self.num_drafted + later.num_drafted,
            self.num_accepted + later.num_accepted,
            max(self.num_sequences, later.num_sequences),
            max(self.num_batch_tokens, later.num_batch_tokens),
            max(self.num_prompt_tokens, later.num_prompt_tokens),
            later.received_s,
            self.first_token,
            max(self.gap_s, later.gap_s),
        )

    def to_dict(self, origin_s: float) -> dict[str, int | float]:
        """Returns a JSON-ready dict; times are milliseconds since ``origin_s``."""
        return {
            "step": int(self.step_index),
            "start_ms": round((self.started_s - origin_s) * 1e3, 3),
            "duration_ms": round((self.ended_s - self.started_s) * 1e3, 3),
            "busy_ms": round(self.busy_s * 1e3, 3),
            "draft_ms": round(self.draft_s * 1e3, 3),
            "steps": int(self.num_steps),
            "computed_tokens": int(self.num_computed),
            "tokens": int(self.num_emitted),
            "first_token": int(self.first_token),
            "drafted_tokens": int(self.num_drafted),
            "accepted_tokens": int(self.num_accepted),
            "batch_sequences": int(self.num_sequences),
            "batch_tokens": int(self.num_batch_tokens),
            "batch_prompt_tokens": int(self.num_prompt_tokens),
            "received_ms": round((self.received_s - origin_s) * 1e3, 3),
            "gap_ms": round(self.gap_s * 1e3, 3),
        }


_WIDTH = len(StepRow._fields)


class StepLog:
    """Keeps the first ``limit`` steps, sums of the rest, and the ``num_slowest`` largest gaps of the rest.

    Attributes:
        rest: the steps after the limit, merged into runs: a run of steps that recompute and one of others alternate.
            The last of ``MAX_RUNS`` takes all later steps.
    """

    __slots__ = ("_cells", "_last_received_s", "_limit", "_num_slowest", "_slowest", "rest")

    def __init__(self, limit: int = MAX_STEPS, num_slowest: int = MAX_SLOWEST) -> None:
        self._cells = array("d")
        self._limit = limit * _WIDTH
        self._num_slowest = num_slowest
        self._slowest: list[tuple[float, StepRow, StepRow]] = []
        self._last_received_s: float | None = None
        self.rest: list[StepRow] = []

    def follow(self, received_s: float) -> None:
        """Counts gaps since ``received_s``, the arrival of the token before the first of these steps."""
        self._last_received_s = received_s

    def add(
        self,
        *,
        step_index: int,
        started_s: float,
        ended_s: float,
        busy_s: float,
        draft_s: float,
        num_steps: int,
        num_computed: int,
        num_emitted: int,
        num_drafted: int,
        num_accepted: int,
        num_sequences: int,
        num_batch_tokens: int,
        num_prompt_tokens: int,
        received_s: float,
        first_token: int,
    ) -> None:
        """Adds a step. Call in the order of the steps."""
        gap_s = 0.0
        if num_emitted:
            if self._last_received_s is not None:
                gap_s = received_s - self._last_received_s
            self._last_received_s = received_s
        cells = (
            step_index, started_s, ended_s, busy_s, draft_s, num_steps, num_computed, num_emitted, num_drafted,
            num_accepted, num_sequences, num_batch_tokens, num_prompt_tokens, received_s, first_token, gap_s,
        )  # fmt: skip
        if len(self._cells) < self._limit:
            self._cells.extend(cells)
        else:
            self._fold(StepRow._make(map(float, cells)))

    def _fold(self, row: StepRow) -> None:
        before = self.rest[-1] if self.rest else self._last_kept() or row
        # Rows differ in their times, so comparing them never goes further than that.
        heapq.heappush(self._slowest, (row.gap_s, row, before))
        if len(self._slowest) > self._num_slowest:
            heapq.heappop(self._slowest)
        if self.rest and (self.rest[-1].recomputes == row.recomputes or len(self.rest) == MAX_RUNS):
            self.rest[-1] = self.rest[-1].merged_with(row)
        else:
            self.rest.append(row)

    def _last_kept(self) -> StepRow | None:
        return StepRow._make(self._cells[-_WIDTH:]) if self._cells else None

    def __len__(self) -> int:
        """Number of steps; a merged row counts for all its steps."""
        return int(sum(row.num_steps for row in self))

    def __bool__(self) -> bool:
        return bool(self._cells or self.rest)

    def __iter__(self) -> Iterator[StepRow]:
        """Iterates over the steps that were kept, then the merged rest."""
        yield from self.kept()
        yield from self.rest

    def kept(self) -> Iterator[StepRow]:
        """Iterates over the first ``limit`` steps."""
        for start in range(0, len(self._cells), _WIDTH):
            yield StepRow._make(self._cells[start : start + _WIDTH])

    def slowest_behind_limit(self) -> list[StepRow]:
        """The steps of the rest with the largest gaps, slowest first."""
        return [row for _, row, _ in sorted(self._slowest, reverse=True)]

    def slowest_gap(self) -> tuple[StepRow, StepRow | None] | None:
        """The step that ended the longest wait for a token, and the step before it; ``None`` without any wait."""
        found: tuple[float, StepRow, StepRow | None] | None = max(self._slowest, default=None)
        before: StepRow | None = None
        for row in self.kept():
            if row.num_emitted and row.gap_s > (found[0] if found else 0.0):
                found = (row.gap_s, row, before)
            before = row
        return None if found is None else (found[1], found[2])

    def to_dict(self, origin_s: float) -> dict[str, object]:
        """Returns a JSON-ready dict; times are milliseconds since ``origin_s``."""
        return {
            "kept": [row.to_dict(origin_s) for row in self.kept()],
            "rest": [row.to_dict(origin_s) for row in self.rest],
            "slowest_of_rest": [row.to_dict(origin_s) for row in self.slowest_behind_limit()],
        }

"""Lookahead decoding: the target generates n-grams by Jacobi iteration, and verifies them as drafts.

Fu et al., arXiv 2402.02057. A window follows the last known token. It has ``W`` columns of ``N - 1`` levels; the last
known token itself is level 0 of column 0:

position          p     p+1   p+2   p+3   p+4  p+5      W = 3, N = 4
level 0           root  a1    a2
level 1                 b0    b1    b2
level 2                       c0    c1    c2
found                               d0    d1   d2       d1 is the target's likeliest token after … root a1 b1 c1

A token sees level 0 up to its own column, then its column above it, so the window is a tree, and forms one draft with
the verified n-grams. After the step, n-grams such as ``a1 b1 c1 d1`` are added to the pool under their first token, and
the levels move up: ``b`` becomes level 0 of the window that begins one token later, ``d`` its last level.

Guesses are the arg maxima of unprocessed logits, independent of the request's sampling parameters; verification decides
which of them are right.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.errors import ConfigError
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.device.uploads import take_rows
from decode_worker.speculation.acceptance import AcceptanceTracker
from decode_worker.speculation.method import Outlook
from decode_worker.speculation.tree import tree_draft

Source = Literal["text", "found", "window"]
_Key = tuple[Source, int, int]

_PRIORS: dict[Source, float] = {"text": 0.4, "found": 0.3, "window": 0.1}
_MAX_POOLED_NGRAMS = 4096


@dataclass(frozen=True, slots=True)
class LookaheadSettings:
    """The settings of lookahead decoding.

    Attributes:
        window: columns of the window, ``W``; 0 verifies n-grams of the text only.
        ngram: tokens of an n-gram, ``N``; the window has one level less.
        guesses: n-grams verified in a step, ``G``, and kept for each first token.
        learns_from_text: whether n-grams of prompt and output are pooled too.

    Raises:
        ConfigError: a number is out of its range.
    """

    window: int = 5
    ngram: int = 4
    guesses: int = 5
    learns_from_text: bool = True

    def __post_init__(self) -> None:
        for name, least in (("window", 0), ("ngram", 2), ("guesses", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"lookahead's {name} must be at least {least}, got {getattr(self, name)!r}.")

    def shares(self, room: int, num_guesses: int) -> tuple[int, int]:
        """How many n-grams to verify and how many columns to compute with ``room`` nodes.

        N-grams get half of the room, plus what a whole window leaves. At least one is verified, since the window only
        pays through them.

        Args:
            num_guesses: number of available n-grams.
        """
        length = self.ngram - 1
        whole_window = max(0, self.window * length - 1)
        most = max(1, max(room // 2, room - whole_window) // length)
        num_guesses = min(num_guesses, self.guesses, most)
        num_columns = (room - num_guesses * length + 1) // length
        return num_guesses, max(0, min(self.window, num_columns))


@dataclass(frozen=True, slots=True)
class Guess:
    """A pooled n-gram without its first token."""

    token_ids: tuple[int, ...]
    source: Source


class NgramPool:
    """N-grams of one request by their first token. The least recently used ones are dropped first.

    Args:
        per_token: maximum number of n-grams for each first token.
        capacity: maximum number of all n-grams.
    """

    def __init__(self, per_token: int, capacity: int = _MAX_POOLED_NGRAMS) -> None:
        self._per_token = per_token
        self._capacity = capacity
        self._by_first: OrderedDict[int, OrderedDict[tuple[int, ...], Source]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, ngram: Sequence[int], source: Source) -> None:
        """Makes an n-gram the newest one of its first token."""
        first, rest = ngram[0], tuple(ngram[1:])
        own = self._by_first.setdefault(first, OrderedDict())
        self._by_first.move_to_end(first)
        self._size += rest not in own
        own[rest] = source
        own.move_to_end(rest)
        if len(own) > self._per_token:
            self._drop_oldest(own)
        while self._size > self._capacity:
            oldest = next(iter(self._by_first))
            self._drop_oldest(self._by_first[oldest])
            if not self._by_first[oldest]:
                del self._by_first[oldest]

    def following(self, token: int) -> list[Guess]:
        """The guesses after a token, newest first."""
        own = self._by_first.get(token)
        if own is None:
            return []
        self._by_first.move_to_end(token)
        return [Guess(rest, source) for rest, source in reversed(own.items())]

    def _drop_oldest(self, own: OrderedDict[tuple[int, ...], Source]) -> None:
        own.popitem(last=False)
        self._size -= 1


@dataclass(slots=True)
class JacobiWindow:
    """The window of one request.

    Attributes:
        num_levels: number of tokens of a column.
        position: position of level 0 of the first column.
        columns: tokens of each column, level 0 first.
    """

    num_levels: int
    position: int = 0
    columns: list[list[int]] = field(default_factory=list)

    def place(self, request: Request, num_columns: int, chance: random.Random) -> None:
        """Places the window after the request's last known token. New columns start as pieces of its text."""
        last = request.num_tokens - 1
        del self.columns[: max(0, last - self.position)]
        self.position = last
        while len(self.columns) < num_columns:
            start = chance.randrange(max(1, request.num_tokens - self.num_levels + 1))
            places = range(start, start + self.num_levels)
            self.columns.append([request.token_at(min(place, last)) for place in places])
        if self.columns:
            self.columns[0][0] = request.token_at(last)

    def paths(self, num_columns: int) -> list[tuple[int, ...]]:
        """For each of the first columns, the tokens from the last known token to the column's last level."""
        chain = [column[0] for column in self.columns[:num_columns]]
        return [(*chain[1 : index + 1], *self.columns[index][1:]) for index in range(len(chain))]

    def advance(self, found: Sequence[int]) -> list[tuple[int, ...]]:
        """Moves the window by one token. Columns that were not computed are dropped.

        Args:
            found: the tokens after the paths of the first columns.

        Returns:
            The n-grams of these columns.
        """
        ngrams = [(*column, token) for column, token in zip(self.columns, found, strict=False)]
        self.columns = [list(ngram[1:]) for ngram in ngrams]
        self.position += 1
        return ngrams


@dataclass(slots=True)
class _State:
    """One request's pool and window.

    Attributes:
        num_learned: number of tokens of its text whose n-grams are in the pool.
        num_columns: number of the window's columns in the current draft.
        keys: key of the acceptance estimate of each node of the draft.
    """

    pool: NgramPool
    window: JacobiWindow
    chance: random.Random
    num_learned: int = 0
    num_columns: int = 0
    keys: list[_Key] = field(default_factory=list)


class LookaheadProposer:
    """A :class:`~.method.DraftMethod`. A draft has its n-grams first, then the window.

    Nodes of the window are rarely accepted, but their logits yield new n-grams. If only a part of a draft is verified,
    the omitted columns start anew.
    """

    def __init__(self, settings: LookaheadSettings | None = None) -> None:
        self._settings = settings or LookaheadSettings()
        self._states: dict[str, _State] = {}
        self._acceptance = AcceptanceTracker()

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """A draft for every sequence that has room for one."""
        drafts = {}
        for scheduled in plan:
            request = scheduled.request
            limit = room.get(request.request_id, 0)
            if limit and len(draft := self._propose_one(request, limit)):
                drafts[request.request_id] = draft
        return drafts

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook | None:
        """``None``: drafts are read from the pool and the window."""
        return None

    @torch.inference_mode()
    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Moves the windows by the target's likeliest tokens after their columns."""
        if not self._states:
            return
        due: list[tuple[_State, int]] = []
        rows: list[int] = []
        for sequence, own_rows in zip(batch.sequences, batch.rows_of, strict=True):
            request = sequence.request
            state, result = self._states.get(request.request_id), results.get(request.request_id)
            if state is None or result is None or result.next_token is None:
                continue
            if state.num_columns and state.window.position == request.num_tokens - 1:
                nodes = _ends(sequence.draft, state.window.paths(state.num_columns))
                due.append((state, len(nodes)))
                rows += [own_rows.start + 1 + node for node in nodes]
            state.num_columns = 0
        if not rows:
            return
        found = take_rows(logits, rows).argmax(dim=-1).tolist()
        for state, count in due:
            own, found = found[:count], found[count:]
            if own:
                for ngram in state.window.advance(own):
                    state.pool.add(ngram, "found")

    def observe(self, result: VerifyResult) -> None:
        state = self._states.get(result.sequence.request.request_id)
        if state is None:
            return
        draft, accepted = result.sequence.draft, set(result.nodes)
        for node, key in enumerate(state.keys[: len(draft)]):
            parent = draft.parent(node)
            if parent == ROOT or parent in accepted:
                self._acceptance.record(key, _PRIORS[key[0]], float(node in accepted))

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def _propose_one(self, request: Request, room: int) -> Draft:
        state = self._state(request)
        guesses = state.pool.following(request.token_at(request.num_tokens - 1))
        num_guesses, num_columns = self._settings.shares(room, len(guesses))
        guesses = guesses[:num_guesses]
        state.window.place(request, num_columns, state.chance)
        state.num_columns = num_columns
        columns = state.window.paths(num_columns)
        paths = [*(guess.token_ids[:room] for guess in guesses), *columns]
        starts: list[tuple[Source, int]] = [(guess.source, rank) for rank, guess in enumerate(guesses)]
        starts += [("window", 0)] * len(columns)
        keys: list[list[_Key]] = [
            [(source, rank, depth) for depth in range(len(path))]
            for path, (source, rank) in zip(paths, starts, strict=True)
        ]
        probs = [[self._acceptance.estimate(key, _PRIORS[key[0]]) for key in path] for path in keys]
        draft, places = merge_paths(paths, probs)
        # Where paths share a node, it counts for the first of them.
        of_node = {
            node: key
            for own_nodes, own_keys in zip(reversed(places), reversed(keys), strict=True)
            for node, key in zip(own_nodes, own_keys, strict=True)
        }
        state.keys = [of_node[node] for node in range(len(draft))]
        return draft

    def _state(self, request: Request) -> _State:
        """A request's state, up to date with its text."""
        settings = self._settings
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _State(
                NgramPool(settings.guesses), JacobiWindow(settings.ngram - 1), random.Random(request.params.seed)
            )
        if settings.learns_from_text:
            # A long prompt is learned only as far as the pool has room.
            start = max(state.num_learned - settings.ngram + 1, request.num_tokens - _MAX_POOLED_NGRAMS, 0)
            text = request.tokens_between(start, request.num_tokens)
            for end in range(max(settings.ngram, state.num_learned - start + 1), len(text) + 1):
                state.pool.add(text[end - settings.ngram : end], "text")
            state.num_learned = request.num_tokens
        return state


def merge_paths(
    paths: Sequence[Sequence[int]], probs: Sequence[Sequence[float]] | None = None
) -> tuple[Draft, list[list[int]]]:
    """Merges several guesses of the next tokens into one tree, in which common beginnings occur once.

    Args:
        paths: token ids, nearest first.
        probs: branch probabilities, one for each token; a shared node gets the highest.

    Returns:
        The draft: the nodes of the first path, then those that each further path adds. And for each path the nodes of
        its tokens.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    best: list[float] = []
    nodes: dict[tuple[int, int], int] = {}
    places: list[list[int]] = []
    for index, path in enumerate(paths):
        parent = ROOT
        place: list[int] = []
        for depth, token in enumerate(path):
            node = nodes.setdefault((parent, token), len(token_ids))
            if node == len(token_ids):
                token_ids.append(token)
                parents.append(parent)
                best.append(0.0)
            if probs is not None:
                best[node] = max(best[node], probs[index][depth])
            place.append(node)
            parent = node
        places.append(place)
    return tree_draft(token_ids, parents, None if probs is None else best), places


def _ends(draft: Draft, paths: Sequence[Sequence[int]]) -> list[int]:
    """The nodes where paths end, up to the first path that is not in the draft."""
    children = {(draft.parent(node), token): node for node, token in enumerate(draft.token_ids)}
    ends: list[int] = []
    for path in paths:
        node: int | None = ROOT
        for token in path:
            node = children.get((node, token)) if node is not None else None
        if node is None:
            break
        ends.append(node)
    return ends

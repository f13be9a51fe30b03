"""How often drafts are accepted: a first guess from the draft network's own probabilities, then learned in service."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from baton.core.request import Request

_PRIOR_WEIGHT = 4.0
_MAX_WEIGHT = 60.0
# All greater depths share one estimate.
_DEEPEST = 5
_OWN_WEIGHT = 4.0
_OWN_MEMORY = 0.96
_MIN_FACTOR, _MAX_FACTOR = 0.2, 2.0
_ALMOST_CERTAIN = 0.98
# Buckets of a draft network's probability of its guess.
_LIMITS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
_EDGES = (0.0, *_LIMITS, 1.0)
# Networks overestimate the probability that they are right.
_PRIOR_FACTOR = 0.8


@dataclass(slots=True)
class _Estimate:
    mean: float
    weight: float


class AcceptanceTracker:
    """Conditional acceptance by key: the share of drafts that were accepted, given that all before them were.

    An estimate starts at its prior, which counts as a few observations, and forgets observations more than about sixty
    back.
    """

    def __init__(self) -> None:
        self._estimates: dict[Hashable, _Estimate] = {}

    def estimate(self, key: Hashable, prior: float) -> float:
        found = self._estimates.get(key)
        return prior if found is None else found.mean

    def record(self, key: Hashable, prior: float, value: float) -> None:
        """Learns one observation. Only drafts that were reached count: all before them were accepted."""
        found = self._estimates.setdefault(key, _Estimate(prior, _PRIOR_WEIGHT))
        found.weight = min(found.weight + 1, _MAX_WEIGHT)
        found.mean += (value - found.mean) / found.weight

    def record_chain(
        self, num_drafted: int, num_accepted: int, key_of: Callable[[int], tuple[Hashable, float]]
    ) -> None:
        """Learns from the drafts of a chain that were reached: the accepted ones, and the first that was not.

        Args:
            key_of: key and prior of the draft at a position.
        """
        for position in range(min(num_accepted + 1, num_drafted)):
            key, prior = key_of(position)
            self.record(key, prior, float(position < num_accepted))


@dataclass(slots=True)
class _Own:
    """Drafts of one request that were reached: how many were right, and how many were expected to be."""

    expected: float = _OWN_WEIGHT
    right: float = _OWN_WEIGHT


class DepthAcceptance:
    """The chance that a draft is right, by its depth: the chance for similar requests, times a factor of this request.

    Args:
        prior: the chance before any observation, given that the draft above is right.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._by_depth = AcceptanceTracker()
        self._own: dict[str, _Own] = {}

    def chance(self, request: Request, depth: int) -> float:
        """The chance at a depth, given that everything above it is right."""
        own = self._own.get(request.request_id)
        factor = 1.0 if own is None else min(max(own.right / own.expected, _MIN_FACTOR), _MAX_FACTOR)
        return min(_ALMOST_CERTAIN, factor * self._of_its_like(request, depth))

    def reach(self, request: Request, num_depths: int) -> tuple[float, ...]:
        """By depth, the chance that everything up to it is right."""
        chances: list[float] = []
        for depth in range(num_depths):
            chances.append(self.chance(request, depth) * (chances[-1] if chances else 1.0))
        return tuple(chances)

    def learn(self, request: Request, num_known: int, num_right: int) -> None:
        """Learns from a draft.

        Args:
            num_known: depths whose outcome is known if those above them were right.
            num_right: tokens that were right, from the first one on.
        """
        own = self._own.setdefault(request.request_id, _Own())
        for depth in range(min(num_known, num_right + 1)):
            is_right = float(depth < num_right)
            own.expected = _OWN_WEIGHT + _OWN_MEMORY * (own.expected - _OWN_WEIGHT) + self._of_its_like(request, depth)
            own.right = _OWN_WEIGHT + _OWN_MEMORY * (own.right - _OWN_WEIGHT) + is_right
            self._by_depth.record(_key(request, depth), self._prior, is_right)

    def forget(self, request_id: str) -> None:
        """Forgets a request that ended."""
        self._own.pop(request_id, None)

    def _of_its_like(self, request: Request, depth: int) -> float:
        return self._by_depth.estimate(_key(request, depth), self._prior)


def bucket_of(probability: float) -> int:
    """The class of guesses about as likely as this, according to the network that made them."""
    return sum(probability >= limit for limit in _LIMITS)


def prior_of(bucket: int) -> float:
    """The share of a bucket's guesses that is accepted, before any was observed."""
    return _PRIOR_FACTOR * (_EDGES[bucket] + _EDGES[bucket + 1]) / 2


def kind_of(request: Request) -> int:
    """The class of requests of about the same temperature, which have about the same acceptance."""
    return min(4, round(request.params.temperature * 2))


def num_right(token_ids: Sequence[int], outcome: Sequence[int]) -> int:
    """How many tokens of a guess, from its first one on, agree with the outcome."""
    count = 0
    for guessed, token in zip(token_ids, outcome, strict=False):
        if guessed != token:
            break
        count += 1
    return count


def _key(request: Request, depth: int) -> tuple[int, int]:
    return kind_of(request), min(depth, _DEEPEST)

"""The routing contracts. Policies see snapshots, never workers, and so run against simulations as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.slo import STANDARD, SloClass


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as the router knows it at one moment.

    Attributes:
        accepting: healthy, and not about to leave.
        in_flight: requests assigned to it that are not over.
        assigned: requests ever assigned to it.
    """

    worker_id: str
    pool: str
    accepting: bool
    in_flight: int
    assigned: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What policies may know of a request.

    Attributes:
        failed_on: workers on which an attempt of this request has failed.
        slo: what the request was promised.
    """

    request_id: str
    num_prompt_tokens: int
    failed_on: frozenset[str] = frozenset()
    slo: SloClass = STANDARD


class Filter(Protocol):
    def filter(self, candidates: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        """Those that may serve the request."""
        ...


class Scorer(Protocol):
    def score(self, candidates: Sequence[WorkerSnapshot], request: RoutingRequest) -> dict[str, float]:
        """Worker id → score in [0, 1]; 1 is best."""
        ...


class Picker(Protocol):
    def pick(self, candidates: Sequence[WorkerSnapshot], scores: Mapping[str, float]) -> WorkerSnapshot:
        """One of the candidates, of which there is at least one."""
        ...

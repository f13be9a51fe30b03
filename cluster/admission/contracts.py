"""What admission needs of those that choose routes and keep the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from cluster.requests.request_record import RequestRecord
from cluster.routing.base import Preference, RouteDecision


class Placement(Protocol):
    """A request's place on its route."""

    def release(self) -> None:
        """Gives it back; a second call changes nothing."""
        ...


PlacementT_co = TypeVar("PlacementT_co", bound=Placement, covariant=True)


class Dispatcher(Protocol[PlacementT_co]):
    """Chooses routes. All methods are synchronous, so that nobody gets in between."""

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        """The best route at present, of which nothing is booked. None: no worker may take the request.

        Args:
            preferred: routes that go before all others.
        """
        ...

    def book(self, record: RequestRecord, decision: RouteDecision) -> PlacementT_co:
        """From now on the request counts as work of its route, until its place is released."""
        ...

    def missing_pools(self) -> Sequence[str]:
        """Pools without a worker that takes requests."""
        ...

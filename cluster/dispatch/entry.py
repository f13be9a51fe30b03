"""How requests get their places on workers, as the router sees it."""

from __future__ import annotations

from typing import Protocol

from cluster.requests.journal import Journal
from cluster.routing.dispatcher import Placement


class Entry(Protocol):
    """See :class:`cluster.admission.admission.Admission`."""

    async def admit(self, journal: Journal) -> Placement:
        """A place for the next attempt, booked; the caller releases it, and waits for nothing before it holds it.

        Raises:
            OverloadedError: there is no room.
            NoWorkerError: there was no worker for too long.
            DeadlineError: the request's own time is over.
        """
        ...

    def first_token(self, journal: Journal) -> None:
        """A prompt is computed."""
        ...

    def ended(self, journal: Journal) -> None:
        """A sequence is over, however it went."""
        ...

"""What the gateway's operator endpoints ask of the cluster."""

from __future__ import annotations

from typing import Any, Protocol

from baton.explain.timelines import Order


class AdminBackend(Protocol):
    """The control plane, as the gateway sees it. Every dictionary is ready for JSON."""

    async def status(self) -> dict[str, Any]:
        """Pools, workers, blocks in use and requests in flight."""
        ...

    async def scale(self, targets: dict[str, int | None]) -> dict[str, Any]:
        """Sets the number of workers of the named pools and says what was begun.

        Args:
            targets: None: the autoscaler decides.

        Raises:
            BatonError: a pool does not exist or cannot have that size.
        """
        ...

    async def change_role(self, source: str, destination: str) -> dict[str, Any]:
        """Makes a worker of one pool a worker of the other, once it is drained.

        Raises:
            BatonError: workers cannot change, or the pool has none to spare.
        """
        ...

    async def plan(self) -> dict[str, Any]:
        """What the autoscaler would do next, and why, whether or not it is on."""
        ...

    async def advise(self) -> dict[str, Any]:
        """What would serve the traffic seen better with the same workers."""
        ...

    def timeline(self, request_id: str) -> dict[str, Any]:
        """The waterfall of a request.

        Raises:
            NotFoundError: it is not known, or not any more.
        """
        ...

    def requests(self, order: Order, limit: int) -> list[dict[str, Any]]:
        """The newest or the slowest of the requests whose timelines are kept."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus' text format."""
        ...

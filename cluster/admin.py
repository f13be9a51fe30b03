"""What the gateway's operator endpoints ask of the cluster."""

from __future__ import annotations

from typing import Any, Protocol

from cluster.timelines import Order


class AdminBackend(Protocol):
    """The control plane, as the gateway sees it. Every dictionary is ready for JSON."""

    async def status(self) -> dict[str, Any]:
        """Pools, workers, blocks in use and requests in flight."""
        ...

    async def scale(self, targets: dict[str, int]) -> dict[str, Any]:
        """Sets the number of workers of the named pools and says what was begun.

        Raises:
            BatonError: a pool does not exist or cannot have that size.
        """
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

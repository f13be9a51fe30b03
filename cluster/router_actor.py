"""What Ray runs as the router."""

from __future__ import annotations

from cluster.router_host import RouterHost
from cluster.without_torch import do_without_torch


class RouterActor(RouterHost):
    """The router in a process of its own: one that never loads torch."""

    def __init__(self, config: dict[str, object], port: int, controller: object) -> None:
        do_without_torch()
        super().__init__(config, port, controller)

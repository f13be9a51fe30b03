"""What several commands share: options of those that ask a router, how they ask it, and how they show a duration."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from baton.client.local_cluster import find_endpoint
from baton.client.router_client import RouterClient

T = TypeVar("T")

ERROR_PREFIX = "error: "
"""Before the message that a command ends with."""

EndpointOption = Annotated[
    str | None,
    typer.Option(help="Base URL of the router. Else BATON_ENDPOINT, else the cluster that `baton up` started here."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the router's answer as JSON.")]


def with_client(endpoint: str | None, act: Callable[[RouterClient], Awaitable[T]]) -> T:
    """What ``act`` says of a client of the router that :func:`baton.client.local_cluster.find_endpoint` finds.

    Raises:
        BatonError: there is no such router, or it answers with an error.
    """

    async def connect_and_act() -> T:
        async with RouterClient(find_endpoint(endpoint)) as client:
            return await act(client)

    return asyncio.run(connect_and_act())


def duration(milliseconds: float) -> str:
    """As it was measured: ``4.2 ms``, ``128 ms``, ``10.5 s``."""
    if milliseconds >= 10_000:
        return f"{milliseconds / 1e3:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"

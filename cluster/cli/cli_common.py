"""Shared parts of the commands: the options for the router, the client, and the format of durations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from baton.client.local_cluster import find_endpoint, read_state
from baton.client.router_client import RouterClient

T = TypeVar("T")

ERROR_PREFIX = "error: "
"""Prefix of the message of a failed command."""

EndpointOption = Annotated[
    str | None,
    typer.Option(help="Base URL of the router. Default: BATON_ENDPOINT, or the cluster of `baton up` on this machine."),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Certificate of the router or of its issuer, for https. Default: BATON_CA, or the certificate of the "
        "cluster of `baton up` on this machine.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the router's answer as JSON.")]


def with_client(endpoint: str | None, ca: Path | None, act: Callable[[RouterClient], Awaitable[T]]) -> T:
    """Calls ``act`` with a client of the router and returns its result.

    Args:
        endpoint: see :func:`baton.client.local_cluster.find_endpoint`.
        ca: see :func:`baton.client.trust.tls_context`.

    Raises:
        BatonError: there is no router, or it answers with an error.
    """

    async def connect_and_act() -> T:
        address = find_endpoint(endpoint)
        state = read_state()
        if state is not None and address == state.endpoint and (why := state.why_stopped()):
            typer.echo(f"warning: {why}", err=True)
        async with RouterClient(address, ca) as client:
            return await act(client)

    return asyncio.run(connect_and_act())


def duration(milliseconds: float) -> str:
    """A duration with its unit: ``4.2 ms``, ``128 ms``, ``10.5 s``."""
    if milliseconds >= 10_000:
        return f"{milliseconds / 1e3:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"

"""``baton wait-idle``: waits for the end of the requests in flight, before what serves them is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

import typer

from baton.client.router_client import RouterClient, RouterUnreachableError
from baton.core.errors import DeadlineError
from cluster.cli.cli_common import CaOption, EndpointOption, with_client
from cluster.cli.cli_reporter import Reporter

_POLL_S = 0.5


def wait_idle(
    timeout: Annotated[float, typer.Option(min=0, help="Longest wait, in seconds.")] = 600.0,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Wait until the router has no requests in flight, such as before a shutdown. New requests are not refused."""
    with Reporter() as report:
        with_client(endpoint, ca, lambda client: wait_until_idle(client, timeout, report))


async def wait_until_idle(client: RouterClient, timeout_s: float, report: Callable[[str], None]) -> None:
    """Returns when no request is in flight, or when there is no router.

    Raises:
        DeadlineError: requests are still in flight after ``timeout_s``.
    """
    until_s = time.monotonic() + timeout_s
    shown = 0
    while True:
        try:
            in_flight = await client.num_in_flight()
        except RouterUnreachableError as error:
            report(error.message)
            return
        if not in_flight:
            return
        if time.monotonic() >= until_s:
            raise DeadlineError(f"Still in flight after {timeout_s:g} s: {in_flight} sequences. Raise --timeout.")
        if in_flight != shown:
            report(f"{in_flight} sequences in flight")
            shown = in_flight
        await asyncio.sleep(_POLL_S)

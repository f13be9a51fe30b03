"""Waiting for the end of the requests in flight."""

from __future__ import annotations

import httpx
import pytest

from baton.client.router_client import RouterClient, RouterUnreachableError, UntrustedRouterError
from baton.core.errors import DeadlineError, InvalidApiKeyError
from cluster.cli import cli_wait_idle
from cluster.cli.cli_wait_idle import wait_until_idle


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(cli_wait_idle, "_POLL_S", 0.0)


def router(*in_flight: int | None) -> RouterClient:
    """A router whose metrics show these numbers, one after the other; ``None``: it is gone."""
    numbers = iter(in_flight)

    def answer(request: httpx.Request) -> httpx.Response:
        number = next(numbers)
        if request.url.path != "/metrics" or number is None:
            raise httpx.ConnectError("refused")
        text = f"# HELP baton_requests_in_flight Sequences in flight.\nbaton_requests_in_flight {float(number)}\n"
        return httpx.Response(200, text=text)

    return RouterClient("http://router:8000", transport=httpx.MockTransport(answer))


async def test_it_waits_for_the_last_request_and_reports_changes():
    lines: list[str] = []
    async with router(3, 3, 1, 0) as client:
        await wait_until_idle(client, 60.0, lines.append)
    assert lines == ["3 sequences in flight", "1 sequences in flight"]


async def test_a_router_that_ends_has_no_requests():
    lines: list[str] = []
    async with router(3, None) as client:
        await wait_until_idle(client, 60.0, lines.append)
    assert "No answer from http://router:8000" in lines[-1]


async def test_the_error_says_how_many_are_left():
    async with router(2, 2) as client:
        with pytest.raises(DeadlineError, match="after 0 s: 2 sequences"):
            await wait_until_idle(client, 0.0, lambda line: None)


async def test_a_router_that_wants_a_key_is_not_idle():
    body = {"error": {"code": "invalid_api_key", "message": "A key is needed."}}
    transport = httpx.MockTransport(lambda request: httpx.Response(401, json=body))
    async with RouterClient("http://router:8000", transport=transport) as client:
        with pytest.raises(InvalidApiKeyError, match="A key is needed"):
            await wait_until_idle(client, 60.0, lambda line: None)


async def test_a_router_that_is_not_trusted_is_not_idle():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    async with RouterClient("http://router:8000", transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(UntrustedRouterError, match="--ca or in BATON_CA"):
            await wait_until_idle(client, 60.0, lambda line: None)


async def test_another_server_is_named():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="nothing 1"))
    async with RouterClient("http://other", transport=transport) as client:
        with pytest.raises(RouterUnreachableError, match="http://other/metrics has no baton_requests_in_flight"):
            await client.num_in_flight()


async def test_the_requests_of_several_routers_are_added():
    name = "baton_requests_in_flight"
    text = f'# TYPE {name} gauge\n{name}{{router="0"}} 3.0\n{name}{{router="1"}} 4.0\n{name}_other 9.0\n'
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    async with RouterClient("http://router", transport=transport) as client:
        assert await client.num_in_flight() == 7

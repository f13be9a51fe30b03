"""Other servers: strict, terse, or behind another path prefix."""

import orjson
import pytest
from aiohttp import web

from baton.bench.discovery import TargetError, count_prompt, describe_endpoint, find_model, settle
from baton.bench.endpoint import Endpoint, RequestSpec
from baton.bench.settings import TargetSettings
from baton.core.errors import ConfigError
from tests.serving_reference import serving

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}\n\n'


def server(refused: tuple[str, ...] = (), models: object = None, usage: bool = True) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if any(name in body for name in refused):
            return web.json_response({"error": {"message": "unknown parameter"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(TOKEN + (USAGE if usage and "stream_options" in body else b"") + b"data: [DONE]\n\n")
        return response

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response(models, status=404 if models is None else 200)

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    application.router.add_get("/v1/models", list_models)
    return application


@pytest.mark.parametrize(
    ("refused", "exact_lengths", "requests_usage", "num_notes"),
    [((), True, True, 0), (("ignore_eos",), False, True, 1), (("ignore_eos", "stream_options"), False, False, 2)],
)
async def test_options_that_a_server_refuses_are_left_out(refused, exact_lengths, requests_usage, num_notes):
    async with serving(server(refused)) as url:
        endpoint, notes = await settle(Endpoint(url, "m"))
    assert (endpoint.exact_lengths, endpoint.requests_usage, len(notes)) == (exact_lengths, requests_usage, num_notes)


async def test_a_server_that_refuses_everything_is_reported():
    async with serving(server(("prompt",))) as url:
        with pytest.raises(TargetError, match="http_400"):
            await settle(Endpoint(url, "m"))


async def test_the_service_tier_is_sent_and_the_response_tier_is_shown():
    async with serving(server(("service_tier",))) as url:
        plain, chosen = (describe_endpoint(TargetSettings(url=url, service_tier=tier)) for tier in (None, "gold"))
        spec = RequestSpec("Hello", None, 2)
        assert [orjson.loads(endpoint.body(spec)).get("service_tier") for endpoint in (plain, chosen)] == [None, "gold"]
        await settle(plain)
        with pytest.raises(TargetError, match="http_400: unknown parameter"):
            await settle(chosen)


async def test_the_first_model_is_the_default_and_an_unknown_one_is_refused():
    async with serving(server(models={"data": [{"id": "alpha"}, {"id": "beta"}]})) as url:
        assert (await find_model(Endpoint(url, ""))).model == "alpha"
        assert (await find_model(Endpoint(url, "beta"))).model == "beta"
        with pytest.raises(ConfigError, match="Did you mean beta"):
            await find_model(Endpoint(url, "betta"))


@pytest.mark.parametrize(("told", "known"), [(2048, 2048), (None, None), ("many", None), (True, None), (0, None)])
async def test_the_context_is_the_one_reported_by_the_server(told, known):
    models = [{"id": "alpha"}, {"id": "beta", "max_model_len": told}]
    async with serving(server(models={"data": models})) as url:
        assert (await find_model(Endpoint(url, "beta"))).max_model_len == known
        assert (await find_model(Endpoint(url, ""))).max_model_len is None


async def test_without_a_model_list_the_model_must_be_named():
    async with serving(server()) as url:
        assert (await find_model(Endpoint(url, "mine"))).model == "mine"
        with pytest.raises(TargetError, match="--model"):
            await find_model(Endpoint(url, ""))


async def test_prompt_tokens_are_counted_by_the_server():
    async with serving(server()) as url:
        assert await count_prompt(Endpoint(url, "m"), "text") == 5
    async with serving(server(usage=False)) as url:
        with pytest.raises(TargetError, match="--tokenizer"):
            await count_prompt(Endpoint(url, "m"), "text")


@pytest.mark.parametrize(
    ("url", "base_url"),
    [
        ("http://host:1", "http://host:1/v1"),
        ("http://host:1/v1/", "http://host:1/v1"),
        ("host:1", "http://host:1/v1"),
        ("https://host/api/openai/v1", "https://host/api/openai/v1"),
        ("https://host/serving", "https://host/serving"),
    ],
)
def test_urls_are_normalized(url, base_url):
    assert describe_endpoint(TargetSettings(url=url)).base_url == base_url


def test_the_key_of_this_machines_cluster_is_sent_nowhere_else(monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", "ours")
    monkeypatch.setattr("baton.bench.discovery.find_endpoint", lambda url: url or "http://127.0.0.1:8000")
    assert describe_endpoint(TargetSettings()).api_key == "ours"
    assert describe_endpoint(TargetSettings(api_key="other")).api_key == "other"
    assert describe_endpoint(TargetSettings(url="http://elsewhere")).api_key is None


@pytest.mark.parametrize("model", ["", "m"])
async def test_a_server_that_wants_another_key_is_named(model):
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=401)

    application = web.Application()
    application.router.add_get("/v1/models", refuse)
    async with serving(application) as url:
        with pytest.raises(TargetError, match=r"answered 401: it wants another API key.*BATON_BENCH_API_KEY"):
            await find_model(Endpoint(url, model))

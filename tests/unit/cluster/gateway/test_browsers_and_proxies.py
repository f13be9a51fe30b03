"""Pages of configured origins, HEAD, and slashes after paths."""

from __future__ import annotations

import httpx
import pytest

from baton.core.errors import ConfigError
from cluster.config.config import BatonConfig
from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys, digest_of
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.origins import OriginPolicy
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say, serve
from tests.unit.cluster.gateway.edge_serving import answer_to

TOKENIZER = byte_level_tokenizer()
PAGE, STRANGER = "https://chat.example.com", "https://evil.example"
KEY = "k" * 16
BODY = {"model": MODEL, "prompt": "hello", "stream": True}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def client(*, with_key: bool = False, cors_origins: tuple[str, ...] = (PAGE,)) -> httpx.AsyncClient:
    keys = ApiKeys([ApiKeyConfig(name="a", key_sha256=digest_of(KEY))] if with_key else [])
    app = create_app(
        FakeGenerator(TOKENIZER, say(TOKENIZER, "hi")),
        TOKENIZER,
        FakeAdmin(),
        GatewayLimits(),
        api_keys=keys,
        origins=OriginPolicy("127.0.0.1", (), cors_origins),
        cors_origins=cors_origins,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.mark.parametrize("with_key", [False, True])
async def test_a_page_of_a_configured_origin_streams(*, with_key: bool) -> None:
    async with client(with_key=with_key) as http:
        headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
        asked = await http.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
        answer = await http.post("/v1/completions", json=BODY, headers=headers)
        refused = await http.post("/v1/completions", json={}, headers=headers)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert (answer.status_code, refused.status_code) == (200, 400)
    assert {each.headers["access-control-allow-origin"] for each in (asked, answer, refused)} == {PAGE}


async def test_other_pages_get_no_answer_that_they_could_read() -> None:
    async with client() as http:
        asked = await http.options("/v1/completions", headers={"Origin": STRANGER, **PREFLIGHT})
        answer = await http.post("/v1/completions", json=BODY, headers={"Origin": STRANGER})
        wrong_method = {"Origin": PAGE, **PREFLIGHT, "Access-Control-Request-Method": "PUT"}
        put = await http.options("/v1/completions", headers=wrong_method)
    assert (asked.status_code, answer.status_code) == (403, 403)
    told = "may not be used here. Pages of the origins in router.cors_origins may send GET, HEAD, POST, DELETE."
    for refused, what in ((asked, "origin"), (put, "method")):
        assert refused.json()["error"]["message"] == f"The page's {what} {told}"
        assert refused.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in {**asked.headers, **answer.headers}


async def test_without_origins_there_is_no_cors() -> None:
    async with client(cors_origins=()) as http:
        asked = await http.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
    assert asked.status_code in (403, 405)
    assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}"])
async def test_head_is_get_without_a_body(path: str) -> None:
    app = create_app(FakeGenerator(TOKENIZER, say(TOKENIZER, "hi")), TOKENIZER, FakeAdmin(), GatewayLimits())
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as http:
        whole, head = await http.get(path), await http.head(path)
        assert (await http.head("/v1/completions")).status_code == 405
        assert (await http.get("/health")).status_code == 200  # the connection is still in order
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


async def test_a_slash_after_the_path_changes_nothing() -> None:
    async with client(with_key=True) as http:
        headers = {"Authorization": f"Bearer {KEY}"}
        assert (await http.get("/v1/models/", headers=headers)).json()["object"] == "list"
        assert (await http.post("/v1/completions/", json=BODY, headers=headers)).status_code == 200
        assert (await http.get("/health//")).status_code == 200
        assert (await http.get("/v1/models/")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("PUT", "/v1/files/file-1", "DELETE, GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
    ],
)
async def test_a_wrong_method_names_all_that_the_path_takes(method: str, path: str, allowed: str) -> None:
    async with client() as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["message"] == f"{method} {path} is not allowed; the method must be {allowed}."


async def test_a_target_may_be_a_whole_url() -> None:
    app = create_app(FakeGenerator(TOKENIZER, say(TOKENIZER, "hi")), TOKENIZER, FakeAdmin(), GatewayLimits())
    async with serve(app) as url:
        address = url.removeprefix("http://")
        host, _, port = address.partition(":")
        for target in (f"http://{address}/v1/models?limit=1", f"http://{address}"):
            sent = f"GET {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
            status, _, _ = await answer_to((host, int(port)), sent.encode())
            assert status == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"cors_origins": ["chat.example.com"]}, "is not an origin"),
        ({"cors_origins": ["https://chat.example.com/page"]}, "is not an origin"),
        ({"cors_origins": ["*"]}, "set api_keys"),
    ],
)
def test_wrong_origins_are_refused(router: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatonConfig.from_dict({"router": router})


def test_origins_are_spelled_as_browsers_do() -> None:
    config = BatonConfig.from_dict({"router": {"cors_origins": ["HTTPS://Chat.example.com:8443"]}})
    assert config.router.cors_origins == ["https://chat.example.com:8443"]

"""Without API keys, web pages of other sites cannot use the endpoint; programs are not affected."""

from __future__ import annotations

import httpx
import pytest

from baton.core.errors import ConfigError, UntrustedOriginError
from cluster.config.config import BatonConfig
from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.origins import OriginPolicy, host_of
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say
from tests.unit.cluster.gateway.edge_serving import answer_to, serving

TOKENIZER = byte_level_tokenizer()
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


def allows(policy: OriginPolicy, host: str | None, origin: str | None = None) -> bool:
    try:
        policy.check([] if host is None else [host], [] if origin is None else [origin])
    except UntrustedOriginError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "127.0.0.5", "[::1]:8000", "[0:0:0:0:0:0:0:1]", None],
)
def test_names_of_this_machine_are_allowed(host: str | None) -> None:
    assert allows(OriginPolicy("127.0.0.1"), host)
    assert allows(OriginPolicy("::1"), host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "evil.example:8000", "127.0.0.1.evil.example", "0.0.0.0:8000", ""),
        *("localhost@evil.example", "user@localhost", "localhost/", "localhost evil", "[::1", "[::2]", "10.0.0.1"),
        *("localhost:80:80", "2130706433", "127.1"),
    ],
)
def test_other_names_are_refused_on_loopback(host: str) -> None:
    assert not allows(OriginPolicy("127.0.0.1"), host)
    assert not allows(OriginPolicy("localhost", ["good.example"]), host)


def test_several_hosts_or_origins_are_refused() -> None:
    policy = OriginPolicy("127.0.0.1")
    with pytest.raises(UntrustedOriginError, match="'localhost' and 'evil'"):
        policy.check(["localhost", "evil"], [])
    with pytest.raises(UntrustedOriginError):
        policy.check(["localhost"], ["http://localhost", "http://localhost"])


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        *((f"http://{name}", True) for name in ("localhost:3000", "127.0.0.1", "[::1]:5173", "LocalHost")),
        *((origin, True) for origin in ("https://good.example:444", "https://GOOD.example.", "app://localhost")),
        *((origin, False) for origin in ("null", "", "http://evil.example", "https://good.example.evil.example")),
        *((origin, False) for origin in ("http://localhost@evil.example", "localhost", "http://", "file://")),
        *((origin, False) for origin in ("http://evil.example:8000", "http://localhost/path", "http://a http://b")),
    ],
)
def test_pages_of_other_sites_are_refused(origin: str, allowed: bool) -> None:
    policy = OriginPolicy("127.0.0.1", ["good.example"])
    assert allows(policy, "127.0.0.1:8000", origin) is allowed


def test_on_a_network_pages_of_the_endpoint_itself_are_allowed() -> None:
    policy = OriginPolicy("0.0.0.0")
    assert allows(policy, "gpu-server:8000")
    assert allows(policy, "gpu-server:8000", "http://gpu-server:3000")
    assert not allows(policy, "gpu-server:8000", "http://evil.example")
    assert not allows(policy, None, "http://evil.example")


def test_on_a_network_given_hosts_are_the_only_ones() -> None:
    policy = OriginPolicy("0.0.0.0", ["gpu-server", "[2001:db8::1]"])
    assert allows(policy, "GPU-server:8000")
    assert allows(policy, "[2001:0db8::1]:8000")
    assert not allows(policy, "rebound.evil.example", "http://rebound.evil.example")


@pytest.mark.parametrize("name", ["http://a", "a:80", "[::1]:80", "::1", "a/b", ""])
def test_an_allowed_host_has_no_scheme_and_no_port(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        BatonConfig.from_dict({"router": {"allowed_hosts": [name]}})
    assert BatonConfig.from_dict({"router": {"allowed_hosts": ["baton.example.com", "[::2]"]}})


def app_with(*, keys: ApiKeys | None = None):
    generator = FakeGenerator(TOKENIZER, say(TOKENIZER, "hi"))
    origins = OriginPolicy("127.0.0.1")
    return create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), api_keys=keys, origins=origins)


def client_of(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/admin/scale", "/admin/move"])
async def test_a_page_cannot_post(path: str) -> None:
    async with client_of(app_with()) as http:
        answer = await http.post(path, json=COMPLETION, headers={"Origin": "http://evil.example"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "untrusted_origin"
        assert "router.cors_origins" in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"]
        answer = await http.post(path, json=COMPLETION, headers={"Host": "evil.example"})
        assert answer.status_code == 403
        # A page may send this without its browser asking first.
        answer = await http.post(path, content=b'{"prefill": 1}')
        assert answer.status_code == 415
        assert "-H 'Content-Type: application/json'" in answer.json()["error"]["message"]


async def test_a_page_cannot_read() -> None:
    async with client_of(app_with()) as http:
        for path in ("/", "/health", "/metrics", "/v1/models", "/v1/requests", "/admin/status", "/made/up"):
            assert (await http.get(path, headers={"Origin": "null"})).status_code == 403
            assert (await http.get(path, headers={"Host": "rebound.evil.example"})).status_code == 403


async def test_programs_are_served() -> None:
    async with client_of(app_with()) as http:
        assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200
        page = {"Origin": "http://localhost:3000"}
        assert (await http.post("/v1/completions", json=COMPLETION, headers=page)).status_code == 200


async def test_with_keys_the_key_decides() -> None:
    keys = ApiKeys([ApiKeyConfig(name="one", key="a" * 16)])
    async with client_of(app_with(keys=keys)) as http:
        headers = {"Origin": "http://page.example", "Host": "baton.example"}
        assert (await http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 401
        headers["Authorization"] = f"Bearer {'a' * 16}"
        assert (await http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.0\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n", b"403"),
        (b"GET /health HTTP/1.0\r\nHost: evil.example\r\n", b"403"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: \r\n", b"403"),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n", b"403"),
        (b"GET http://localhost@evil.example/health HTTP/1.1\r\nHost: localhost\r\n", b"403"),
        (b"GET http://[::1/health HTTP/1.1\r\nHost: localhost\r\n", b"400"),
        (b"GET http:///health HTTP/1.1\r\nHost: localhost\r\n", b"403"),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n", b"200"),  # RFC 9112, section 3.2.2
    ],
)
async def test_hosts_on_the_wire(head: bytes, status: bytes) -> None:
    async with serving(app_with()) as address:
        first, _, _ = await answer_to(address, head + b"Connection: close\r\n\r\n")
    assert first.split()[1] == status


def test_a_host_has_one_spelling() -> None:
    assert host_of("LocalHost.:8000") == "localhost"
    assert host_of("[0::1]") == "::1"
    assert host_of("x:") == "x"

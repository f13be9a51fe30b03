"""The router's client rebuilds errors, reads streams to their end, and finds the endpoint."""

import socket
from dataclasses import replace

import httpx
import psutil
import pytest

from baton.client.local_cluster import (
    RunState,
    clear_state,
    find_endpoint,
    no_cluster,
    read_state,
    state_file,
    write_state,
)
from baton.client.router_client import CHAT_PATH, COMPLETION_PATH, ResponseError, RouterClient, RouterUnreachableError
from baton.core.errors import ConfigError, ContextLengthError, OverloadedError, WorkerLostError
from tests.unit.cluster.fake_router import FakeRouter, running


@pytest.fixture(scope="module")
def router():
    with running() as fake:
        yield fake


@pytest.fixture
async def client(router: FakeRouter):
    async with RouterClient(router.endpoint) as connected:
        yield connected


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.delenv("BATON_ENDPOINT", raising=False)


def chat(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_answers_are_returned_whole(client):
    assert await client.model() == "fake"
    answer = await client.generate(COMPLETION_PATH, {"prompt": "a"})
    assert answer["choices"][0]["text"] == "echo a"
    assert (await client.timeline("one"))["request_id"] == "one"


async def test_a_stream_is_read_to_the_end(client):
    chunks = [chunk async for chunk in client.stream(CHAT_PATH, chat("a"))]
    assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == "echo a"
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_an_error_is_rebuilt_with_its_class(client):
    with pytest.raises(ContextLengthError, match=r"The prompt is \[too\] long"):
        await client.generate(CHAT_PATH, chat("FAIL"))
    with pytest.raises(ContextLengthError):
        _ = [chunk async for chunk in client.stream(CHAT_PATH, chat("FAIL"))]
    with pytest.raises(WorkerLostError, match="The worker died"):
        _ = [chunk async for chunk in client.stream(CHAT_PATH, chat("DIE"))]


async def test_an_overload_error_has_its_retry_time(client):
    with pytest.raises(OverloadedError) as caught:
        await client.generate(CHAT_PATH, chat("BUSY once"))
    assert caught.value.retry_after_s == 0.01


async def test_a_broken_stream_is_an_error(client):
    with pytest.raises(RouterUnreachableError, match="ended the stream before it was complete"):
        _ = [chunk async for chunk in client.stream(CHAT_PATH, chat("CUT"))]


@pytest.mark.parametrize(("key", "header"), [("", None), ("a-key", "Bearer a-key")])
async def test_the_key_in_the_environment_is_sent(monkeypatch, key, header):
    monkeypatch.setenv("BATON_API_KEY", key)
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    async with RouterClient("http://x", transport=httpx.MockTransport(answer)) as client:
        await client.status()
    assert seen == [header]


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(502, text="<html>bad gateway"), ResponseError, "HTTP status 502"),
        (httpx.Response(500, json=["x"]), ResponseError, "HTTP status 500"),
        (httpx.Response(400, json={"error": {"message": "no", "code": "strange"}}), ResponseError, "no"),
        (httpx.Response(200, text="<html>"), RouterUnreachableError, "did not answer with JSON"),
        (httpx.Response(200, json=[1]), RouterUnreachableError, "JSON object"),
    ],
)
async def test_answers_of_another_server_are_errors(response, error, message):
    async with RouterClient("http://x", transport=httpx.MockTransport(lambda request: response)) as client:
        with pytest.raises(error, match=message):
            await client.status()


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (httpx.ReadTimeout(""), r"\(ReadTimeout\)\. It accepts connections, but may hang; then `baton up` says so"),
        (httpx.ReadError(""), r"\(ReadError\)\. The connection broke off, as it does when the router is lost"),
        (httpx.RemoteProtocolError("ended"), r"\(RemoteProtocolError\)\. The connection broke off"),
        (httpx.ConnectError("refused"), r"\(refused\)\. Is the cluster running\? See `baton up`\. A router"),
    ],
)
async def test_a_router_without_an_answer_is_an_error_with_advice(error: httpx.HTTPError, advice: str):
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    async with RouterClient("http://router", transport=httpx.MockTransport(fail)) as client:
        with pytest.raises(RouterUnreachableError, match=advice):
            await client.status()


async def test_an_unreachable_server_is_an_error_with_advice():
    async with RouterClient("http://127.0.0.1:9") as client:
        with pytest.raises(RouterUnreachableError, match=r"No answer from http://127.0.0.1:9 .*baton up"):
            await client.status()


async def test_a_proxy_in_the_environment_is_not_used_for_loopback(router, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with RouterClient(router.endpoint) as client:
        assert await client.model() == "fake"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://h:1", "http://h:1"),
        ("h:1/", "http://h:1"),
        ("https://h/v1/", "https://h"),
    ],
)
def test_common_forms_of_endpoints_are_accepted(given, expected, monkeypatch):
    assert find_endpoint(given) == expected
    monkeypatch.setenv("BATON_ENDPOINT", given)
    assert find_endpoint() == expected
    assert find_endpoint("http://other:2") == "http://other:2"


@pytest.mark.parametrize("given", ["ftp://h", "http://", "://", "localhost:80a", "h:99999", "http://[::1"])
def test_an_invalid_endpoint_is_refused(given):
    with pytest.raises(ConfigError, match="is not an endpoint"):
        find_endpoint(given)


def test_a_client_with_an_invalid_url_is_refused():
    for endpoint in ("http://[::1", "http://a\x07b"):
        with pytest.raises(ConfigError, match="is not an endpoint"):
            RouterClient(endpoint)


def test_the_recorded_cluster_is_found_while_it_runs():
    with pytest.raises(ConfigError, match="No cluster runs"):
        find_endpoint()
    state = RunState.of_this_process({"model": "m"})
    write_state(state)
    with pytest.raises(ConfigError, match="still starting"):
        find_endpoint()
    write_state(replace(state, endpoint="http://127.0.0.1:5"))
    assert find_endpoint() == "http://127.0.0.1:5"
    assert read_state() == replace(state, endpoint="http://127.0.0.1:5")


def test_a_later_process_with_the_same_pid_is_not_the_cluster():
    state = RunState.of_this_process({})
    assert state.is_running()
    assert not RunState(state.pid, state.start + "0").is_running()
    assert not RunState(2**22 + 1, state.start).is_running()
    assert not RunState(2**22 + 1, "").is_running()


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_cluster_is_found_after_the_clock_was_set(jump_s, monkeypatch):
    """The system then reports another time of day for the start of the process."""
    state = RunState.of_this_process({})
    boot_s = psutil.boot_time() + jump_s
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_s)
    assert state.is_running()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"pid": "x"}'])
def test_an_unreadable_record_is_ignored(content):
    state_file().parent.mkdir(parents=True)
    state_file().write_text(content)
    assert read_state() is None


def test_a_cluster_clears_only_its_own_record():
    state = RunState.of_this_process({})
    write_state(state)
    for other in (replace(state, pid=state.pid + 1), replace(state, start="of another machine")):
        clear_state(other)
        assert read_state() == state
    clear_state(state)
    assert not state_file().exists()


def test_machines_that_share_a_folder_have_records_of_their_own(monkeypatch):
    here = replace(RunState.of_this_process({}), endpoint="http://127.0.0.1:5")
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    write_state(here)
    monkeypatch.setattr("socket.gethostname", lambda: "two")
    assert read_state() is None
    with pytest.raises(ConfigError, match=r"No cluster runs on this machine.* records of other machines: one\."):
        find_endpoint()
    write_state(replace(here, endpoint="http://127.0.0.1:6"))
    clear_state(here)
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    assert find_endpoint() == "http://127.0.0.1:5"


def test_a_process_of_another_container_is_not_the_cluster(monkeypatch):
    """Containers of one machine have one boot, and ids of their own."""
    state = RunState.of_this_process({})
    monkeypatch.setattr("pathlib.Path.readlink", lambda path: "pid:[1]")
    assert not state.is_running()


def test_a_cluster_of_another_user_is_named_and_not_denied(monkeypatch, router):
    monkeypatch.setattr("baton.client.local_cluster._USUAL_ENDPOINT", router.endpoint)
    with pytest.raises(ConfigError) as caught:
        find_endpoint()
    assert "is a cluster" not in str(caught.value), "some other server"
    router.admin_answers["/"] = {"name": "baton"}
    with pytest.raises(ConfigError, match=rf"{router.endpoint} is a cluster, which another user or a service may run"):
        find_endpoint()
    write_state(RunState.of_this_process({}))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ConfigError, match=r"belongs to another user\. Run the command as that user"):
        no_cluster()


@pytest.mark.parametrize("key", ["two words-of-a-key", "sk-schlüssel-0123456789", "sk-0123456789\nabcdef"])
def test_an_unsendable_key_is_reported_without_its_value(monkeypatch, key):
    monkeypatch.setenv("BATON_API_KEY", key)
    with pytest.raises(ConfigError, match="BATON_API_KEY") as caught:
        RouterClient("http://127.0.0.1:1")
    assert key not in str(caught.value)


async def test_a_trailing_newline_is_not_part_of_the_key(monkeypatch, router):
    monkeypatch.setenv("BATON_API_KEY", "sk-secret-0123456789abcdef\r\n")
    async with RouterClient(router.endpoint) as connected:
        assert await connected.model() == "fake"


def test_the_folder_of_the_record_can_be_chosen(tmp_path, monkeypatch):
    """Pods of several clusters may share one volume of models."""
    write_state(RunState.of_this_process({}))
    assert state_file() == tmp_path / "run" / socket.gethostname() / "cluster.json"
    monkeypatch.setenv("BATON_RUN", str(tmp_path / "own"))
    assert read_state() is None
    write_state(RunState.of_this_process({}))
    assert (tmp_path / "own" / "cluster.json").exists()

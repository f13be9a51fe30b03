"""The controller: both pools, the router before them, and the router's replacement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.exceptions import RayTaskError

from baton.core.errors import BatonError
from benchmarks.lost_routers import listeners
from cluster.config.config import BatonConfig
from cluster.controller.controller import Controller
from tests.fake_hosts import HangingHost, MisconfiguredHost, OtherLayoutHost, ServingHost
from tests.fake_ray import FakeRay, RealRay
from tests.fake_workers import expected_tokens
from tests.pool_listener import ON_BOTH_RAYS
from tests.tiny_tokenizers import write_model_folder
from tests.waiting import until

TIMEOUT_S = 180.0
NO_WORKERS = {pool: {"resources": {"cpus": 99}} for pool in ("prefill", "decode")}
"""Settings for clusters whose tests need only the router: no node has room for the workers."""


ON_REAL_RAY = pytest.mark.parametrize("a_ray", ["real"], indirect=True)


@pytest.fixture(autouse=True)
def _a_router_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a simulated Ray run the router here, without changing this process's imports and garbage collection."""
    monkeypatch.setattr("cluster.actors.do_without_torch", lambda: None)
    monkeypatch.setattr("cluster.actors.imports_that_stay", contextlib.nullcontext)
    monkeypatch.setattr("cluster.router_process.router_host.spare_pauses", lambda: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


class RunningController:
    """A controller actor, with calls that fail as they would have failed there."""

    def __init__(self, a_ray: FakeRay | RealRay, config: dict[str, Any], worker_class: type) -> None:
        checked = BatonConfig.from_dict(config).to_dict()
        self._ray = a_ray
        self._actor = a_ray.remote(Controller).options(num_cpus=0, max_concurrency=100).remote(checked, worker_class)
        self.endpoint = ""

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None

    async def start(self) -> None:
        self.endpoint = await self.call("start")

    async def stop(self) -> None:
        await self.call("stop")
        self._ray.kill(self._actor)

    async def complete(self, max_tokens: int = 5) -> list[int]:
        body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": max_tokens, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            response = await client.post(f"{self.endpoint}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    async def workers(self, pool: str) -> dict[str, str]:
        """Worker id → state."""
        pools = await self.call("pool_status")
        return {worker["id"]: worker["state"] for worker in pools[pool]["workers"]}


Start = Callable[..., contextlib.AbstractAsyncContextManager[RunningController]]


@pytest.fixture
def controller(a_ray: FakeRay | RealRay, model: Path) -> Start:
    """A function that runs a controller within a block."""

    @contextlib.asynccontextmanager
    async def run(worker_class: type = ServingHost, **config: Any) -> AsyncIterator[RunningController]:
        running = RunningController(a_ray, {"model": str(model), "router": {"port": 0}, **config}, worker_class)
        try:
            yield running
        finally:
            await running.stop()

    return run


def listener_pid(endpoint: str) -> int | None:
    """The id of the process that listens on the endpoint's port."""
    return next(iter(listeners(int(endpoint.rsplit(":", 1)[1]))), None)


@ON_REAL_RAY
async def test_the_controller_serves_scales_and_replaces_a_dead_router(controller):
    async with controller() as running:
        await running.start()
        assert await running.complete() == expected_tokens(5)

        for targets, code, message in (
            ({"decode": 2, "verify": 1}, "not_found", r"no pool 'verify'\. Known pools: prefill, decode"),
            ({"decode": 2, "prefill": 0}, "invalid_request", "at least one worker, got prefill=0"),
            ({"decode": 999}, "invalid_request", r"would need 1000 CPUs, but Ray has \d+ on this machine"),
        ):
            with pytest.raises(BatonError, match=message) as raised:
                await running.call("scale", targets)
            assert raised.value.code == code
            assert (await running.call("pool_status"))["decode"]["target"] == 1

        await running.call("scale", {"prefill": 2, "decode": 2})

        async def has_four() -> bool:
            pools = {**await running.workers("prefill"), **await running.workers("decode")}
            return list(pools.values()) == ["ready"] * 4

        await until(has_four)
        assert await running.complete() == expected_tokens(5)

        old_router = listener_pid(running.endpoint)
        assert old_router is not None
        os.kill(old_router, signal.SIGKILL)

        async def is_back() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient() as client:
                    return (await client.get(f"{running.endpoint}/ready")).status_code == 200
            return False

        await until(is_back)
        assert listener_pid(running.endpoint) != old_router
        assert await has_four()  # the same workers: none was restarted
        assert await running.complete() == expected_tokens(5)
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"{running.endpoint}/metrics")).text.splitlines()
        # The controller remembers what a router's own counters would have lost.
        assert {
            "baton_router_restarts_total 1.0",
            'baton_scale_events_total{direction="up",pool="decode"} 1.0',
            'baton_workers{pool="decode",state="ready"} 2.0',
            'baton_worker_up{pool="prefill",worker="prefill-2"} 1.0',
        } <= set(page)

        await running.call("scale", {"prefill": 1, "decode": 1})

        async def has_two() -> bool:
            return [*await running.workers("prefill"), *await running.workers("decode")] == ["prefill-1", "decode-1"]

        await until(has_two)
        assert await running.complete() == expected_tokens(5)


@ON_REAL_RAY
async def test_several_routers_share_an_endpoint_and_survive_each_other(controller):
    async with controller(router={"port": 0, "replicas": 2}) as running:
        await running.start()
        port = int(running.endpoint.rsplit(":", 1)[1])

        async def get(path: str) -> httpx.Response:
            async with httpx.AsyncClient() as client:  # a new connection, which any of the routers accepts
                return await client.get(f"{running.endpoint}{path}")

        async def both_listen() -> bool:
            return len(listeners(port)) == 2

        await until(both_listen)
        ids = []
        for _ in range(20):
            assert await running.complete() == expected_tokens(5)
            ids.append((await get("/v1/requests?limit=1")).json()["data"][0]["request_id"])
        assert len(set(ids)) == 20  # any router names the newest request, whichever served it
        for request_id in ids:
            assert (await get(f"/v1/requests/{request_id}/timeline")).json()["request_id"] == request_id
        status = (await get("/admin/status")).json()
        assert status["requests"]["finished"] == 20
        finished = [each["requests"]["finished"] for each in status["routers"]]
        assert (len(finished), sum(finished)) == (2, 20)
        page = (await get("/metrics")).text
        for index, count in enumerate(finished):
            assert f'baton_requests_total{{outcome="length",router="{index}"}} {float(count)}' in page
        assert page.count('baton_worker_up{pool="prefill",worker="prefill-1"}') == 1

        killed = min(listeners(port))
        os.kill(killed, signal.SIGKILL)
        await until(lambda: killed not in listeners(port))
        num_tries, num_done = 0, 0
        while num_done < 10:
            num_tries += 1
            with contextlib.suppress(httpx.TransportError):  # the dying router had accepted the connection
                assert await running.complete() == expected_tokens(5)  # by the other one, or by the next
                num_done += 1
        assert num_tries <= 15
        await until(both_listen)
        assert killed not in listeners(port)

        async def each_knows_the_other() -> bool:
            return len((await get("/admin/status")).json().get("routers", ())) == 2

        await until(each_knows_the_other)
        assert "baton_router_restarts_total 1.0" in (await get("/metrics")).text


KEYS = {"old": "0123456789abcdef", "new": "fedcba9876543210"}


def with_key(model: Path, name: str, **slo: object) -> dict[str, Any]:
    router = {"port": 0, "api_keys": [{"name": name, "key": KEYS[name], "admin": True}]}
    return BatonConfig.from_dict({"model": str(model), "router": router, "slo": slo}).to_dict()


async def test_a_reload_changes_keys_and_classes_while_requests_run(controller, model, tmp_path):
    old = with_key(model, "old")
    async with controller(router=old["router"]) as running:
        await running.start()

        async def status(name: str, slo_class: str = "standard", **body: object) -> int:
            headers = {"Authorization": f"Bearer {KEYS[name]}", "X-Baton-SLO-Class": slo_class}
            values = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 5, **body}
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                return (
                    await client.post(f"{running.endpoint}/v1/completions", json=values, headers=headers)
                ).status_code

        assert await status("old") == 200
        assert await status("old", "gold") == 400
        new = with_key(model, "new", classes={"gold": {"ttft": "1s", "tpot": "1s"}, "standard": {"ttft": "9s"}})
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 5, "stream": True}
            headers = {"Authorization": f"Bearer {KEYS['old']}"}
            async with client.stream(
                "POST", f"{running.endpoint}/v1/completions", json=body, headers=headers
            ) as stream:
                await running.call("reload", new)
                assert b"[DONE]" in await stream.aread()
            assert await status("old") == 401
            assert await status("new", "gold") == 200
            headers = {"Authorization": f"Bearer {KEYS['new']}"}
            shown = (await client.get(f"{running.endpoint}/admin/status", headers=headers)).json()["slo"]
            assert shown["gold"]["windows"]["1m"]["requests"] == 1
            assert shown["standard"]["ttft_target_ms"] == 9000
            page = (await client.get(f"{running.endpoint}/metrics", headers=headers)).text
        assert 'baton_slo_target_seconds{slo_class="standard",target="ttft"} 9.0' in page
        assert 'baton_admission_queued{slo_class="gold"} 0.0' in page
        same = {**new, "router": {**new["router"], "api_keys": new["router"]["api_keys"] * 2}}
        with pytest.raises(BatonError, match="have the same key"):
            await running.call("reload", same)
        for name in ("ca.pem", "node.pem", "node.key"):
            (tmp_path / name).write_text("junk")
        files = {"ca": "ca.pem", "certificate": "node.pem", "key": "node.key"}
        junk = {**new, "security": {key: str(tmp_path / name) for key, name in files.items()}}
        with pytest.raises(BatonError, match=r"security\.\w+: .*ca\.pem"):
            await running.call("reload", junk)
        assert await status("new", "gold") == 200


async def test_an_upgrade_replaces_workers_and_keeps_the_endpoint(controller, model, tmp_path):
    async with controller() as running:
        await running.start()
        old = {"model": str(model), "router": {"port": 0}}

        def with_keys(**changes: Any) -> dict[str, Any]:
            return BatonConfig.from_dict({**old, **changes}).to_dict()

        await running.call("upgrade", with_keys(engine={"threads": 1}, decode={"workers": 2}))

        async def are_new() -> bool:
            pools = {**await running.workers("prefill"), **await running.workers("decode")}
            return pools == dict.fromkeys(["prefill-2", "decode-2", "decode-3"], "ready")

        await until(are_new)
        assert await running.complete() == expected_tokens(5)

        for name, message in (
            ("other", "clients know the model as fake, but would have to call it other"),
            ("fake", "another tokenizer or chat template"),
        ):
            folder = write_model_folder(tmp_path / name)
            (folder / "chat_template.jinja").write_text("{{ messages }}!")
            with pytest.raises(BatonError, match=message):
                await running.call("upgrade", with_keys(engine={"threads": 1}, model=str(folder)))
        with pytest.raises(BatonError, match=r"routing\.picker: best_score → random; only a router"):
            await running.call("upgrade", with_keys(routing={"picker": "random"}))
        assert await are_new()


@ON_REAL_RAY
async def test_workers_that_start_while_the_router_fails_are_kept(controller):
    async with controller() as running:
        await running.start()
        pid = listener_pid(running.endpoint)
        assert pid is not None
        await running.call("scale", {"decode": 2})
        os.kill(pid, signal.SIGKILL)

        async def all_ready() -> bool:
            return await running.workers("decode") == dict.fromkeys(["decode-1", "decode-2"], "ready")

        await until(all_ready)

        async def router_has_all_workers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient() as client:
                    pools = (await client.get(f"{running.endpoint}/admin/status")).json()["pools"]
                return sum("kv_blocks_total" in worker for worker in pools["decode"]["workers"]) == 2
            return False

        await until(router_has_all_workers)


@pytest.mark.parametrize(
    ("worker_class", "code", "message"),
    [
        (MisconfiguredHost, "invalid_config", "context length is 9"),
        (OtherLayoutHost, "worker_lost", "has a different KV layout"),
        (HangingHost, "deadline_exceeded", "After 1 s, 0 of 1 prefill workers are ready"),
    ],
)
async def test_a_failed_start_reports_the_error(controller, worker_class, code, message):
    timeout_s = 1.0 if worker_class is HangingHost else TIMEOUT_S
    async with controller(worker_class, ray={"start_timeout_s": timeout_s}) as running:
        with pytest.raises(BatonError, match=message) as raised:
            await running.start()
        assert raised.value.code == code


@ON_BOTH_RAYS
async def test_a_port_in_use_is_an_error(controller):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with controller(router={"port": port}, **NO_WORKERS) as running:
            with pytest.raises(
                BatonError, match=rf"Cannot listen on router\.host .* port {port}.*router\.port"
            ) as raised:
                await running.start()
            assert raised.value.code == "invalid_config"


async def test_a_model_without_a_tokenizer_is_an_error(controller, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    async with controller(model=str(tmp_path), **NO_WORKERS) as running:
        with pytest.raises(BatonError, match="no usable tokenizer") as raised:
            await running.start()
        assert raised.value.code == "invalid_config"


async def test_several_routers_do_not_share_a_port_with_another_program(controller):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as routers of another cluster do
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with controller(router={"port": taken.getsockname()[1], "replicas": 2}, **NO_WORKERS) as running:
            with pytest.raises(BatonError, match=r"Cannot listen on router\.host"):
                await running.start()


async def test_a_cluster_can_be_stopped_while_it_starts(controller):
    async with controller(HangingHost) as running:
        starting = asyncio.create_task(running.start())

        async def has_begun() -> bool:
            return bool(await running.workers("prefill"))

        await until(has_begun)
        await running.call("stop")
        assert await running.workers("prefill") == {}
        await asyncio.gather(starting, return_exceptions=True)

"""Files and batches of several API keys, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys
from cluster.jobs.jobs_config import JobsConfig
from cluster.requests.generation import GenerationRequest
from tests.job_services import CHAT_URL, app_with_jobs, jsonl, line
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import FakeGenerator, Step, serve
from tests.waiting import until

TOKENIZER = byte_level_tokenizer()
ANN, BOB, NEW = "key-of-ann-000001", "key-of-bob-000001", "new-key-of-ann-001"
ENDED = ("completed", "failed", "expired", "cancelled")
NUM_LINES = 12


def keys(**by_name: str) -> ApiKeys:
    return ApiKeys(ApiKeyConfig.model_validate({"name": name, "key": key}) for name, key in by_name.items())


def as_(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def api_keys() -> ApiKeys:
    return keys(ann=ANN, bob=BOB)


@pytest.fixture
async def http(generator: FakeGenerator, api_keys: ApiKeys, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = JobsConfig(dir=str(tmp_path), max_in_flight=2)
    async with (
        app_with_jobs(generator, TOKENIZER, config, api_keys) as app,
        serve(app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield http


async def submit(http: httpx.AsyncClient, key: str) -> dict[str, Any]:
    content = jsonl(*(line(str(number)) for number in range(NUM_LINES)))
    made = await http.post("/v1/files", headers=as_(key), data={"purpose": "batch"}, files={"file": content})
    body = {"input_file_id": made.json()["id"], "endpoint": CHAT_URL, "completion_window": "24h"}
    batch: dict[str, Any] = (await http.post("/v1/batches", headers=as_(key), json=body)).json()
    return batch


async def ended(http: httpx.AsyncClient, key: str, batch: dict[str, Any]) -> dict[str, Any]:
    for _ in range(2000):
        found: dict[str, Any] = (await http.get(f"/v1/batches/{batch['id']}", headers=as_(key))).json()
        if found.get("status") in ENDED:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


async def entries(http: httpx.AsyncClient, key: str, file_id: str) -> list[Any]:
    content = await http.get(f"/v1/files/{file_id}/content", headers=as_(key))
    return [json.loads(text) for text in content.text.splitlines()]


def after(generator: FakeGenerator, num_requests: int, change: Callable[[], None]) -> None:
    """Calls ``change`` once, with the start of the next request after so many."""
    good = generator.script

    def script(request: GenerationRequest) -> list[Step]:
        if len(generator.requests) == num_requests + 1:
            change()
        return list(good(request))

    generator.script = script


async def test_files_and_batches_of_other_keys_do_not_exist(http: httpx.AsyncClient) -> None:
    batch = await ended(http, ANN, await submit(http, ANN))
    for file_id in (batch["input_file_id"], batch["output_file_id"]):
        for method, path in (("GET", file_id), ("GET", f"{file_id}/content"), ("DELETE", file_id)):
            answer = await http.request(method, f"/v1/files/{path}", headers=as_(BOB))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    for method, path in (("GET", batch["id"]), ("POST", f"{batch['id']}/cancel")):
        answer = await http.request(method, f"/v1/batches/{path}", headers=as_(BOB))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT_URL, "completion_window": "24h"}
    assert (await http.post("/v1/batches", headers=as_(BOB), json=body)).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await http.get(path, headers=as_(BOB))).json()["data"] == []
        assert (await http.get(path)).status_code == 401
    assert len((await http.get("/v1/files", headers=as_(ANN))).json()["data"]) == 2
    assert len(await entries(http, ANN, batch["output_file_id"])) == NUM_LINES


async def test_a_removed_key_ends_its_job_and_loses_nothing_that_is_done(
    http: httpx.AsyncClient, generator: FakeGenerator, api_keys: ApiKeys, tmp_path: Path
) -> None:
    after(generator, 3, lambda: api_keys.become(keys(bob=BOB)))
    batch = await submit(http, ANN)
    await until(lambda: len(list(tmp_path.glob("file-*"))) == 3)  # input, output and errors
    assert (await http.get(f"/v1/batches/{batch['id']}", headers=as_(ANN))).status_code == 401
    assert (await http.get(f"/v1/batches/{batch['id']}", headers=as_(BOB))).status_code == 404
    api_keys.become(keys(ann=NEW, bob=BOB))
    batch = await ended(http, NEW, batch)
    done = await entries(http, NEW, batch["output_file_id"])
    failed = await entries(http, NEW, batch["error_file_id"])
    assert len(done) == batch["request_counts"]["completed"] >= 4
    assert sorted(int(one["custom_id"]) for one in done + failed) == list(range(NUM_LINES))
    assert {one["response"]["status_code"] for one in failed} == {401}
    assert {one["response"]["body"]["error"]["code"] for one in failed} == {"invalid_api_key"}


async def test_a_job_goes_on_under_a_new_key_with_the_same_name(
    http: httpx.AsyncClient, generator: FakeGenerator, api_keys: ApiKeys
) -> None:
    after(generator, 3, lambda: api_keys.become(keys(ann=NEW, bob=BOB)))
    batch = await ended(http, NEW, await submit(http, ANN))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", NUM_LINES)

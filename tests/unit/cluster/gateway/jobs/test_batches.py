"""Files and batches through the official client, in front of a fake router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import openai
import pytest
from openai.types import Batch

from baton.core.errors import OverloadedError, WorkerLostError
from cluster.gateway.openapi import describe_api
from cluster.jobs.file_storage import NewFile
from cluster.jobs.jobs_config import JobsConfig
from cluster.requests.generation import GenerationRequest
from tests.job_services import CHAT_URL, app_with_jobs, jsonl, line
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import TEXT, FakeGenerator, Step, serve
from tests.unit.cluster.gateway.edge_serving import answer_to

TOKENIZER = byte_level_tokenizer()
DOCUMENT = describe_api()
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def config(tmp_path: Path) -> JobsConfig:
    return JobsConfig(dir=str(tmp_path / "jobs"), max_file_bytes=2**20, max_lines=50, max_in_flight=4)


@pytest.fixture
async def url(generator: FakeGenerator, config: JobsConfig) -> AsyncIterator[str]:
    async with app_with_jobs(generator, TOKENIZER, config) as app, serve(app) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def submit(client: openai.AsyncOpenAI, content: bytes, window: Any = "24h", **more: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=CHAT_URL, completion_window=window, **more)


async def when(client: openai.AsyncOpenAI, batch: Batch, condition: Callable[[Batch], bool]) -> Batch:
    for _ in range(2000):
        if condition(batch := await client.batches.retrieve(batch.id)):
            return batch
        await asyncio.sleep(0.02)
    raise AssertionError(batch)


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    return await when(client, batch, lambda batch: batch.status in ENDED)


def num_completed(batch: Batch) -> int:
    return 0 if batch.request_counts is None else batch.request_counts.completed


async def entries(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_answers_each_line_once_in_the_class_batch(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    names = [f"line-{number}" for number in range(20)]
    batch = await ended(client, await submit(client, jsonl(*map(line, names)), metadata={"run": "1"}))
    assert (batch.status, batch.metadata) == ("completed", {"run": "1"})
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
    assert batch.error_file_id is None
    found = await entries(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == names
    assert {one["response"]["status_code"] for one in found} == {200}
    assert found[3]["response"]["body"]["choices"][0]["message"]["content"] in TEXT
    assert found[3]["response"]["request_id"] == found[3]["id"] == found[3]["response"]["body"]["id"]
    assert {request.slo.name for request in generator.requests} == {"batch"}


async def test_a_wrong_line_goes_to_the_error_file(client: openai.AsyncOpenAI) -> None:
    content = jsonl(line("a"), line("b", messages=[], max_tokens=1), line("c"))
    batch = await ended(client, await submit(client, content))
    assert batch.status == "completed"
    assert [one["custom_id"] for one in await entries(client, batch.output_file_id)] == ["a", "c"]
    (wrong,) = await entries(client, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"], wrong["error"]) == ("b", 400, None)
    assert wrong["response"]["body"]["error"]["code"] == "invalid_request"


async def test_a_line_that_asks_for_a_stream_is_an_error_of_its_own(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    hello = [{"role": "user", "content": "hello"}]
    values = {"a": False, "b": True, "c": "yes", "d": None}
    content = jsonl(*(line(name, messages=hello, max_tokens=1, stream=value) for name, value in values.items()))
    batch = await ended(client, await submit(client, content))
    assert batch.status == "completed"
    assert [one["custom_id"] for one in await entries(client, batch.output_file_id)] == ["a", "d"]
    wrong = await entries(client, batch.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in wrong] == [("b", 400), ("c", 400)]
    assert wrong[0]["response"]["body"]["error"]["param"] == "stream"
    assert len(generator.requests) == 2


async def test_lines_are_tried_again_where_the_cluster_is_at_fault(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    failures: list[Exception] = [OverloadedError("full", retry_after_s=0.01), WorkerLostError("gone")]
    good = generator.script

    def script(request: GenerationRequest) -> list[Step]:
        return [failures.pop()] if failures else list(good(request))

    generator.script = script
    batch = await ended(client, await submit(client, jsonl(line("a"), line("b"))))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (jsonl(line("a"), "{broken"), "invalid_json_line", 2),
        (jsonl(line("a"), "", line("a")), "duplicate_custom_id", 3),
        (jsonl(line("a", url="/v1/embeddings")), "invalid_url", 1),
        (jsonl({**line("a"), "method": "GET"}), "invalid_method", 1),
        (jsonl({**line("a"), "custom_id": 7}), "invalid_custom_id", 1),
        (jsonl({**line("a"), "body": []}), "invalid_body", 1),
        (jsonl({**line("a"), "extra": 1}), "unknown_key", 1),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"\n\n", "empty_file", None),
        (jsonl(*(line(str(number)) for number in range(51))), "too_many_requests", None),
    ],
)
async def test_a_corrupt_file_fails_with_the_lines_at_fault(
    client: openai.AsyncOpenAI, generator: FakeGenerator, content: bytes, code: str, number: int | None
) -> None:
    batch = await ended(client, await submit(client, content))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    (problem,) = batch.errors.data
    assert (problem.code, problem.line) == (code, number)
    assert generator.requests == []


async def test_a_slash_after_the_url_of_a_line_changes_nothing(client: openai.AsyncOpenAI) -> None:
    given = line("a")
    batch = await ended(client, await submit(client, jsonl({**given, "url": given["url"] + "/"})))
    assert batch.status == "completed"


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
async def test_a_byte_order_mark_before_a_line_is_no_part_of_it(client: openai.AsyncOpenAI, mark: bytes) -> None:
    content = mark + jsonl(line("a")) + mark + jsonl(line("b"))
    batch = await ended(client, await submit(client, content))
    assert batch.status == "completed"
    assert [one["custom_id"] for one in await entries(client, batch.output_file_id)] == ["a", "b"]
    assert (await client.files.content(batch.input_file_id)).content == content


@pytest.mark.parametrize(("text", "column"), [('{"custom_id": "a"', 17), ('{"custom_id": x}', 15)])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
async def test_a_position_in_a_line_is_its_column(client: openai.AsyncOpenAI, text: str, column: int, end: str) -> None:
    batch = await ended(client, await submit(client, jsonl(line("a")) + (text + end).encode()))
    assert batch.errors is not None
    assert batch.errors.data is not None
    (problem,) = batch.errors.data
    assert problem.line == 2
    assert problem.message is not None
    assert problem.message.startswith("The line is not valid JSON: ")
    assert problem.message.endswith(f" at column {column}.")


async def test_a_byte_order_mark_alone_is_an_empty_file(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await submit(client, b"\xef\xbb\xbf"))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [problem.code for problem in batch.errors.data] == ["empty_file"]


async def test_what_is_done_survives_a_cancellation(client: openai.AsyncOpenAI, generator: FakeGenerator) -> None:
    good = generator.script
    generator.script = lambda request: [None] if len(generator.requests) > 3 else list(good(request))
    batch = await submit(client, jsonl(*(line(str(number)) for number in range(9))))
    await when(client, batch, lambda batch: num_completed(batch) == 3)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert len(await entries(client, batch.output_file_id)) == 3
    with pytest.raises(openai.ConflictError, match="is cancelled and cannot be cancelled"):
        await client.batches.cancel(batch.id)


async def test_an_expired_batch_keeps_its_results_and_names_the_rest(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    good = generator.script
    generator.script = lambda request: [None] if len(generator.requests) > 2 else list(good(request))
    batch = await ended(client, await submit(client, jsonl(*(line(str(number)) for number in range(5))), window="4s"))
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 2, 0)  # those that did not run are in none
    done, rest = await entries(client, batch.output_file_id), await entries(client, batch.error_file_id)
    assert len(done) == 2
    assert sorted(one["custom_id"] for one in done + rest) == ["0", "1", "2", "3", "4"]
    assert {(one["error"]["code"], one["response"]) for one in rest} == {("batch_expired", None)}


async def test_files_can_be_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    files = [await client.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in (3, 1, 2)]
    page = await client.files.list(limit=2)
    assert [file.id for file in page.data] == [files[2].id, files[1].id]
    assert [file.bytes async for file in client.files.list(limit=2, order="asc")] == [3, 1, 2]
    assert await client.files.retrieve(files[0].id) == files[0]
    assert (await client.files.content(files[0].id)).content == b"xxx"
    assert (await client.files.delete(files[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(files[0].id)


async def test_a_batch_of_an_unknown_file_names_its_parameter(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.batches.create(input_file_id="file-1", endpoint=CHAT_URL, completion_window="24h")
    assert caught.value.param == "input_file_id"


async def test_a_compressed_upload_is_refused(url: str) -> None:
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}")}}
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/files", **form, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "send the body uncompressed" in answer.json()["error"]["message"]


async def test_each_result_is_one_line_for_every_client(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await submit(client, jsonl(line("a\u2028b"), line("c\x85d", messages=[]))))
    for file_id, custom_id in ((batch.output_file_id, "a\u2028b"), (batch.error_file_id, "c\x85d")):
        (found,) = await entries(client, file_id)
        assert found["custom_id"] == custom_id


async def test_an_unknown_field_of_a_form_is_told_all_of_them(url: str) -> None:
    form: Any = {"data": {"purpose": "batch", "zzz": "1"}, "files": {"file": ("in.jsonl", b"{}")}}
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/files", **form)
    message = "Unknown field 'zzz'; expected one of file, purpose, expires_after[anchor], expires_after[seconds]."
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


async def test_a_slash_behind_the_endpoint_changes_nothing(client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    endpoint: Any = f"{CHAT_URL}/"
    batch = await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    assert (batch.endpoint, (await ended(client, batch)).status) == (CHAT_URL, "completed")


async def test_batches_can_be_listed_in_pages(client: openai.AsyncOpenAI) -> None:
    made = [(await submit(client, jsonl(line("a")))).id for _ in range(3)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
@pytest.mark.parametrize("after", ["nope", "", "file-nope", "file_", "batch_0", "é" * 300])
async def test_a_page_after_something_that_is_no_id_is_refused(url: str, path: str, after: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.get(path, params={"after": after})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
    assert answer.json()["error"]["message"].startswith("after must be the id of a ")


async def test_ids_of_the_other_list_are_refused(client: openai.AsyncOpenAI) -> None:
    batch = await submit(client, jsonl(line("a")))
    with pytest.raises(openai.BadRequestError, match="after must be the id of a file"):
        await client.files.list(after=batch.id)
    with pytest.raises(openai.BadRequestError, match="after must be the id of a batch"):
        await client.batches.list(after=batch.input_file_id)


async def test_files_can_be_deleted_while_they_are_listed(client: openai.AsyncOpenAI) -> None:
    made = [(await client.files.create(file=("a.jsonl", b"x"), purpose="batch")).id for _ in range(5)]
    deleted = [(await client.files.delete(file.id)).id async for file in client.files.list(limit=2)]
    assert deleted == made[::-1]


async def test_the_input_of_a_running_batch_cannot_be_deleted(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    generator.script = lambda request: [None]
    batch = await submit(client, jsonl(line("a")))
    with pytest.raises(openai.ConflictError, match="Cancel the batch"):
        await client.files.delete(batch.input_file_id)


async def test_a_file_over_the_limit_is_refused_and_leaves_nothing(
    client: openai.AsyncOpenAI, config: JobsConfig
) -> None:
    with pytest.raises(openai.APIStatusError, match=r"jobs\.max_file_bytes") as refused:
        await client.files.create(file=("big.jsonl", b"x" * (2**20 + 1)), purpose="batch")
    assert refused.value.status_code == 413
    assert not list(config.folder.glob("file-*"))
    assert (await client.files.list()).data == []


async def test_a_file_that_is_announced_as_too_large_is_refused_unwritten(
    url: str, config: JobsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(NewFile, "write", lambda _, data: written.append(len(data)))
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": bytes(2**22)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")
    assert not written
    assert not list(config.folder.glob("file-*"))


async def test_an_upload_of_which_the_client_asks_first_is_refused_unread(url: str) -> None:
    """``httpx`` cannot ask, as curl does; a server that answers 100 first would wait for the body."""
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    sent = f"{head}Content-Length: {2**30}\r\nExpect: 100-continue\r\n\r\n".encode()
    first, _, body = await answer_to((urlsplit(url).hostname, urlsplit(url).port), sent)
    assert first.startswith(b"HTTP/1.1 413")
    assert json.loads(body)["error"]["param"] == "file"


async def test_an_upload_goes_to_the_disk_in_pieces(
    generator: FakeGenerator, config: JobsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m tests.large_upload`` measures the memory that 1 GiB takes."""
    sizes: list[int] = []
    write = NewFile.write

    def recorded(new: NewFile, data: bytes) -> None:
        sizes.append(len(data))
        write(new, data)

    monkeypatch.setattr(NewFile, "write", recorded)
    config = config.model_copy(update={"max_file_bytes": 2**25})
    async with (
        app_with_jobs(generator, TOKENIZER, config) as app,
        serve(app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": bytes(2**24)})
    assert (answer.status_code, answer.json()["bytes"], sum(sizes)) == (200, 2**24, 2**24)
    assert max(sizes) <= 2**21


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "batch", "made_up": "1"}, "made_up"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "expires_after"),
    ],
)
async def test_wrong_forms_are_refused(url: str, config: JobsConfig, fields: dict[str, str], param: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/files", data=fields, files={"file": b"x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not list(config.folder.glob("file-*"))


async def test_answers_are_as_described(client: openai.AsyncOpenAI, url: str) -> None:
    def check(answer: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer)

    batch = await ended(client, await submit(client, jsonl("{broken")))
    expiring = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    async with httpx.AsyncClient(base_url=url) as http:
        check((file := (await http.post("/v1/files", data=expiring, files={"file": b"x"})).json()), "File")
        assert file["expires_at"] == file["created_at"] + 3600
        check((await http.get("/v1/files")).json(), "FileList")
        check((await http.delete(f"/v1/files/{file['id']}")).json(), "DeletedFile")
        check((await http.get(f"/v1/batches/{batch.id}")).json(), "Batch")
        check((await http.get("/v1/batches")).json(), "BatchList")
        for method, path in (("GET", "/v1/files/none"), ("GET", "/v1/batches/none"), ("POST", "/v1/batches/x/cancel")):
            answer = await http.request(method, path)
            assert answer.status_code == 404
            check(answer.json(), "Error")

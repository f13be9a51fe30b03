"""``baton submit --file`` and ``baton jobs`` against a gateway with jobs."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.cli.job_files import answers
from cluster.jobs.jobs_config import JobsConfig
from tests.job_services import app_with_jobs, jsonl, line
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.command_line import baton, environment
from tests.unit.cluster.fakes import TEXT, FakeGenerator, serve

__all__ = ["baton", "environment"]  # fixtures

Baton = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(generator: FakeGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The gateway, in a thread of its own, as the commands have an event loop of theirs."""
    config = JobsConfig(dir=str(tmp_path / "jobs"), max_in_flight=4)
    has_begun, found = threading.Event(), [""]
    loop, ends = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with app_with_jobs(generator, byte_level_tokenizer(), config) as app, serve(app) as found[0]:
            has_begun.set()
            await ends.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert has_begun.wait(30)
    monkeypatch.setenv("BATON_ENDPOINT", found[0])
    yield found[0]
    loop.call_soon_threadsafe(ends.set)
    thread.join(30)
    loop.close()


def prompts(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def shown(baton: Baton, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(baton("jobs", "show", batch, "--json")[1])
    return found


def wait(baton: Baton, batch: str, status: str) -> None:
    while shown(baton, batch)["status"] != status:
        time.sleep(0.02)


@pytest.mark.usefixtures("url")
def test_answers_have_the_order_and_the_ids_of_the_prompts(
    baton: Baton, generator: FakeGenerator, tmp_path: Path
) -> None:
    source = prompts(
        tmp_path / "in.jsonl",
        {"prompt": "a", "id": "first"},
        {"messages": [{"role": "user", "content": "b"}], "max_tokens": 1, "temperature": 0.5},
        {"prompt": "c", "id": [7, "\ud800"], "temperature": -1},
        {"prompt": "d", "id": None, "max_completion_tokens": 7, "n": 2},
    )
    target = tmp_path / "out.jsonl"
    status, out, err = baton("submit", "-f", str(source), "-o", str(target), "--seed", "3", "--max-tokens", "9")
    assert (status, out) == (1, "")
    assert "3 answered, 1 failed, of 4" in err
    found = read(target)
    assert [one["id"] for one in found] == ["first", 2, [7, "\ud800"], 4]
    assert [one.get("text", "failed") in TEXT for one in found] == [True, True, False, True]
    assert found[2]["error"]["code"] == "invalid_request"
    assert len(found[3]["choices"]) == 2
    limits = {request.params.max_tokens for request in generator.requests}
    assert limits == {9, 1, 7}
    assert {request.slo.name for request in generator.requests} == {"batch"}


@pytest.mark.usefixtures("url")
def test_a_file_may_begin_with_a_byte_order_mark(baton: Baton, tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", {"prompt": "a"})
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    target = tmp_path / "out.jsonl"
    assert baton("submit", "-f", str(source), "-o", str(target))[0] == 0
    assert len(read(target)) == 1


@pytest.mark.usefixtures("url")
@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_a_file_without_prompts_is_not_sent(baton: Baton, tmp_path: Path, content: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content, encoding="utf-8")
    status, _, err = baton("submit", "-f", str(source), "-o", str(tmp_path / "out.jsonl"))
    assert (status, "in.jsonl has no prompt. Write one JSON object into each line" in err) == (1, True)
    assert "There are no batches" in baton("jobs", "list")[1]


@pytest.mark.usefixtures("url")
def test_a_line_that_is_no_json_is_named_with_its_column(baton: Baton, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": x}\n{"prompt": "b"\n')
    err = baton("submit", "-f", str(source), "-o", str(tmp_path / "out.jsonl"))[2]
    assert "Line 2: not JSON: Expecting value (column 12)." in err
    assert "Line 3: not JSON: Expecting ',' delimiter (column 15)." in err


@pytest.mark.usefixtures("url")
def test_a_detached_batch_is_listed_shown_and_fetched(baton: Baton, tmp_path: Path) -> None:
    assert "There are no batches" in baton("jobs", "list")[1]
    source = prompts(tmp_path / "in.jsonl", *({"prompt": f"p{number}"} for number in range(30)))
    status, out, _ = baton("submit", "-f", str(source), "--detach")
    assert (status, out.startswith("batch_")) == (0, True)
    batch = out.strip()
    wait(baton, batch, "completed")
    assert f"{batch}: completed, 30 answered, 0 failed, of 30." in baton("jobs", "show", batch)[1]
    (row,) = (text for text in baton("jobs", "list")[1].splitlines() if batch in text)
    assert row.split()[1:5] == ["completed", "30", "0", "30"]
    assert json.loads(baton("jobs", "list", "--json")[1])[0]["id"] == batch
    lines = baton("jobs", "fetch", batch)[1].splitlines()
    assert [json.loads(text)["id"] for text in lines] == list(range(1, 31))
    assert baton("jobs", "fetch", batch, "-o", str(tmp_path / "out.jsonl"))[0] == 0
    assert (tmp_path / "out.jsonl").read_text().splitlines() == lines


@pytest.mark.usefixtures("url")
def test_a_cancelled_batch_keeps_what_is_done(baton: Baton, generator: FakeGenerator, tmp_path: Path) -> None:
    good, last = generator.script, generator.tokenizer.encode("b")[-1]
    generator.script = lambda request: [None] if request.prompt_token_ids[-1] == last else list(good(request))
    source = prompts(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    batch = baton("submit", "-f", str(source), "--completion", "--max-tokens", "9", "--detach")[1].strip()
    while shown(baton, batch)["request_counts"]["completed"] < 1:
        time.sleep(0.02)
    status, _, err = baton("jobs", "fetch", batch)
    assert (status, "can be fetched when it has ended" in err) == (1, True)
    assert baton("jobs", "cancel", batch)[0] == 0
    wait(baton, batch, "cancelled")
    _, out, err = baton("jobs", "fetch", batch)
    (answer,) = map(json.loads, out.splitlines())
    assert answer["id"] == 1
    assert f"{batch}: cancelled, 1 answered" in err


def test_batches_of_other_clients_are_fetched_too(baton: Baton, url: str, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        content = jsonl(line("b"), line("7:not JSON"), line("a", messages=[]))
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
    wait(baton, batch, "completed")
    found = [json.loads(text) for text in baton("jobs", "fetch", batch)[1].splitlines()]
    assert [one["id"] for one in found] == ["b", "7:not JSON", "a"]
    assert "error" in found[2]


@pytest.mark.usefixtures("url")
def test_faulty_lines_are_named_and_nothing_is_sent(baton: Baton, generator: FakeGenerator, tmp_path: Path) -> None:
    source = prompts(
        tmp_path / "in.jsonl", {"prompt": "a"}, {"text": "b"}, {"prompt": "a", "messages": []},
        {"prompt": "a", "stream": True}, {"prompt": [1]}, [], {"prompt": "a", "id": "x" * 999},
    )  # fmt: skip
    status, _, err = baton("submit", "-f", str(source), "--detach")
    assert status == 1
    named = ("Line 2: expected either prompt or messages", "Line 4: stream", "Line 5", "--completion", "and 1 more")
    assert all(said in err for said in named)
    source = prompts(source, {"messages": [{"role": "user", "content": "a"}]})
    for flags in ([], ["--completion"]):
        wrong = prompts(tmp_path / "wrong.jsonl", {"prompt": 5})
        assert "Line 1: prompt must be a string, got 5." in baton("submit", "-f", str(wrong), *flags)[2]
    assert "leave out --completion" in baton("submit", "-f", str(source), "--completion")[2]
    assert "There are no batches" in baton("jobs", "list")[1]
    assert not generator.requests


@pytest.mark.usefixtures("url")
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a", "id": 2}', '{"prompt": "b"}'], "Line 2: line 1 has the id 2, too."),
        (['{"prompt": "a", "id": "x"}', '{"prompt": "b", "id": "x"}'], 'Line 2: line 1 has the id "x", too.'),
        (['{"prompt": "a", "max_tokens": 1, "max_tokens": 2}'], "Line 1: the key 'max_tokens' occurs twice"),
        (['{"prompt": ["a", "b"]}'], "Line 1: prompt must be a string, got an array. Write each into a line."),
        ([jsonl(line("a")).decode()], "Line 1: this is a line for /v1/batches: send the file with the openai client"),
        (['{"prompt": [1, 2]}'], "Line 1: A prompt of token ids has no chat form; add --completion."),
    ],
)
def test_what_is_ambiguous_is_not_sent(baton: Baton, tmp_path: Path, lines: list[str], said: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    status, _, err = baton("submit", "-f", str(source), "--detach")
    assert (status, said in err) == (1, True), err


@pytest.mark.usefixtures("url")
def test_token_ids_are_completions(baton: Baton, generator: FakeGenerator, tmp_path: Path) -> None:
    source, target = prompts(tmp_path / "in.jsonl", {"prompt": [1, 2]}), tmp_path / "out.jsonl"
    assert baton("submit", "-f", str(source), "-o", str(target), "--completion", "--max-tokens", "9")[0] == 0
    assert list(generator.requests[0].prompt_token_ids) == [1, 2]
    assert read(target)[0]["id"] == 1


@pytest.mark.usefixtures("url")
def test_targets_that_cannot_be_written_are_refused_first(
    baton: Baton, generator: FakeGenerator, tmp_path: Path
) -> None:
    source = prompts(tmp_path / "in.jsonl", {"prompt": "a"})
    for target, said in ((source, "choose another output file"), (tmp_path / "no" / "x", "Cannot write")):
        status, _, err = baton("submit", "-f", str(source), "-o", str(target))
        assert (status, said in err) == (1, True)
    assert read(source) == [{"prompt": "a"}]
    assert not generator.requests
    status, _, err = baton("submit", "-f", str(source), "-o", "/dev/full")
    assert status == 1
    assert "Cannot write /dev/full: [Errno 28] No space left on device. The answers are kept" in err


@pytest.mark.usefixtures("url")
def test_an_unknown_batch_is_an_error(baton: Baton) -> None:
    for command in ("show", "cancel", "fetch"):
        status, _, err = baton("jobs", command, "batch_no")
        assert (status, "batch_no" in err) == (1, True)


def test_failures_and_answers_are_merged_by_the_numbers_of_the_prompts() -> None:
    def result(number: int, *, fails: bool = False) -> bytes:
        body = {"error": {"message": "m", "type": "t", "code": "c"}} if fails else {"choices": [{"text": "x"}]}
        response = {"status_code": 400 if fails else 200, "body": body}
        return json.dumps({"custom_id": f'{number}:"n{number}"', "response": response, "error": None}).encode()

    expired = {"custom_id": "12:12", "response": None, "error": {"code": "batch_expired", "message": "late"}}
    found = list(answers([result(2), result(10)], [result(9, fails=True), json.dumps(expired).encode()]))
    assert [one["id"] for one in found] == ["n2", "n9", "n10", 12]
    assert found[3]["error"] == {"message": "late", "type": None, "code": "batch_expired"}


TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("choice", "has_more"),
    [
        ({"index": 0, "text": "x", "logprobs": None}, False),
        ({"index": 0, "message": {"role": "assistant", "content": "x", "refusal": None}, "logprobs": None}, False),
        ({"index": 0, "message": {"role": "assistant", "content": "x", "tool_calls": []}}, False),
        ({"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}}, True),
        ({"index": 0, "message": {"role": "assistant", "content": "x", "reasoning_content": "Hm."}}, True),
        ({"index": 0, "text": "x", "logprobs": {"tokens": ["x"]}}, True),
        ({"index": 0, "text": "x", "token_ids": [7]}, True),
    ],
)
def test_an_answer_that_is_more_than_text_keeps_its_choice(choice: dict[str, Any], has_more: bool) -> None:
    body = {"choices": [{**choice, "finish_reason": "stop"}], "usage": {"total_tokens": 3}}
    result = {"custom_id": "1:1", "response": {"status_code": 200, "body": body}, "error": None}
    (found,) = answers([json.dumps(result).encode()], [])
    assert found.get("choices") == (body["choices"] if has_more else None)
    assert (found["finish_reason"], found["usage"]) == ("stop", {"total_tokens": 3})

"""`baton submit`: what it sends and prints, files of prompts, and files that cannot be written to their end."""

import io
import json
import sys

import pytest

from cluster.cli.cli_submit import _Batch
from tests.unit.cluster.command_line import baton, environment, router

__all__ = ["baton", "environment", "router"]  # fixtures


@pytest.mark.parametrize(("flags", "path_key"), [([], "messages"), (["--completion"], "prompt")])
def test_submit_prints_the_answer(baton, router, flags, path_key):
    status, out, _ = baton("submit", "hello", "--max-tokens", "5", "--temperature", "0", *flags, router=router)
    assert (status, out) == (0, "echo hello\n")
    body = router.bodies[-1]
    assert path_key in body
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 5, 0)
    assert "seed" not in body


def test_submit_reads_a_prompt_from_standard_input(baton, router, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nthere\n"))
    status, out, _ = baton("submit", "-", router=router)
    assert (status, out) == (0, "echo hello\nthere\n\n")


@pytest.mark.parametrize("flags", [[], ["--completion"]])
def test_submit_streams_and_reports_a_truncated_answer(baton, router, flags):
    status, out, err = baton("submit", "hello", "--stream", *flags, router=router)
    assert (status, out) == (0, "echo hello\n")
    assert "truncated after 3 tokens" in err


def test_the_error_of_the_router_is_shown_unchanged(baton, router):
    status, out, err = baton("submit", "FAIL", router=router)
    assert (status, out) == (1, "")
    assert err == "error: The prompt is [too] long.\n"


def test_results_of_a_file_keep_order_and_ids_and_record_failures(baton, router, tmp_path):
    lines: list[object] = [
        {"prompt": "a", "id": "first"},
        {"messages": [{"role": "user", "content": "b"}], "max_tokens": 1, "temperature": 0.5},
        {"prompt": "FAIL", "id": 7},
        {"prompt": "BUSY c"},
        {"text": "no prompt"},
        {"prompt": "a", "messages": []},
        {"prompt": "a", "stream": True},
        {"prompt": [1, 2]},
        [],
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\nnot json\n", encoding="utf-8")
    status, _, err = baton("submit", "-f", str(source), "-o", str(target), "--seed", "3", router=router)
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert status == 1
    assert "3 answered, 7 failed" in err
    assert [answer["id"] for answer in answers] == ["first", 2, 7, 4, 5, 6, 7, 8, 9, 11]
    assert [answer.get("text") for answer in answers] == ["echo a", "echo b", None, "echo BUSY c", *[None] * 6]
    assert answers[2]["error"]["code"] == "context_length_exceeded"
    assert "Line 11 is not JSON" in answers[-1]["error"]["message"]
    assert "--completion" in answers[7]["error"]["message"]
    second = next(body for body in router.bodies if body["messages"][0]["content"] == "b")
    assert (second["max_tokens"], second["temperature"], second["seed"]) == (1, 0.5, 3)


def test_a_file_without_failures_succeeds_at_any_concurrency(baton, router, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"p{index}"}) + "\n" for index in range(50)))
    for concurrency in ("1", "16"):
        status, _, _ = baton(
            "submit", "-f", str(source), "-o", str(target), "--concurrency", concurrency, router=router
        )
        assert status == 0
        texts = [json.loads(line)["text"] for line in target.read_text().splitlines()]
        assert texts == [f"echo p{index}" for index in range(50)]


def test_token_ids_go_to_completions(baton, router, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [1, 2]}')
    assert baton("submit", "-f", str(source), "-o", str(target), "--completion", router=router)[0] == 0
    assert json.loads(target.read_text())["text"] == "echo [1, 2]"


def test_the_input_is_never_overwritten(baton, router, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}')
    status, _, err = baton("submit", "-f", str(source), "-o", str(source), router=router)
    assert status == 1
    assert "choose another output file" in err
    assert source.read_text() == '{"prompt": "a"}'


def test_unusable_files_are_errors(baton, router, tmp_path):
    (tmp_path / "in.jsonl").write_text("{}")
    for source, reason in ((tmp_path / "no", "there is no such file"), (tmp_path, "it is a folder")):
        for others in ([], ["-o", "x"], ["-o", "x", "--stream"]):
            status, _, err = baton("submit", "-f", str(source), *others, router=router)
            assert (status, reason in err) == (1, True)
    status, _, err = baton("submit", "-f", str(tmp_path / "in.jsonl"), "-o", "/no/such/folder", router=router)
    assert status == 1
    assert "Cannot write" in err


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_line_can_limit_its_answer_by_either_name(baton, router, tmp_path, limit):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "a", limit: 7}) + '\n{"prompt": "b"}\n')
    arguments = ("-f", str(source), "-o", str(tmp_path / "out.jsonl"), "--concurrency", "1", "--max-tokens", "99")
    assert baton("submit", *arguments, router=router)[0] == 0
    names = ("max_tokens", "max_completion_tokens")
    limits = [{name: body[name] for name in names if name in body} for body in router.bodies]
    assert limits == [{limit: 7}, {"max_tokens": 99}]


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_the_server_chooses_the_service_tier_by_default(baton, router, flags):
    assert baton("submit", "hello", *flags, router=router)[0] == 0
    assert baton("submit", "hello", "--service-tier", "batch", *flags, router=router)[0] == 0
    assert [body.get("service_tier") for body in router.bodies] == [None, "batch"]


def test_a_line_can_choose_another_service_tier(baton, router, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "service_tier": "interactive"}\n{"prompt": "b"}\n')
    arguments = ("-f", str(source), "-o", str(tmp_path / "out.jsonl"), "--concurrency", "1")
    assert baton("submit", *arguments, "--service-tier", "batch", router=router)[0] == 0
    assert [body["service_tier"] for body in router.bodies] == ["interactive", "batch"]


def test_a_full_disk_is_an_error(baton, router, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' * 20)
    status, _, err = baton("submit", "-f", str(source), "-o", "/dev/full", router=router)
    assert status == 1
    assert "Cannot write /dev/full: [Errno 28] No space left on device" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ([], 0),
        (["--temperature", "0.7", "--seed", "1"], 0.7),
        (["--top-p", "0.9"], None),
        (["--seed", "1"], None),
    ],
)
def test_defaults_do_not_override_sampling_options(baton, router, options, temperature):
    assert baton("submit", "hello", *options, router=router)[0] == 0
    assert router.bodies[-1].get("temperature") == temperature


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "0", "--top-p", "0.9"], "have no effect at --temperature 0"),
        (["--temperature", "0", "--seed", "1"], "have no effect at --temperature 0"),
        (["--concurrency", "4"], "--concurrency requires --file"),
    ],
)
def test_options_without_effect_are_refused(baton, router, options, said):
    status, _, err = baton("submit", "hello", *options, router=router)
    assert status == 2
    assert said in err
    assert not router.bodies


async def test_a_write_error_is_raised_unwrapped():
    """The error is a plain one, not a group of exceptions, also where the file can be closed afterwards."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    batch = _Batch(None, "m", {}, True, Full(), 3, lambda done, total: None)
    with pytest.raises(OSError, match="No space left"):
        await batch.run([(number, "not JSON") for number in range(3)], concurrency=3)

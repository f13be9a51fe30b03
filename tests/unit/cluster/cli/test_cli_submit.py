"""`baton submit`: what it sends and prints for one prompt, and options and files that are refused."""

import io
import sys

import pytest

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


def test_unusable_files_are_errors(baton, router, tmp_path):
    (tmp_path / "in.jsonl").write_text("{}")
    for source, reason in ((tmp_path / "no", "there is no such file"), (tmp_path, "it is a folder")):
        for others in ([], ["-o", "x"], ["-o", "x", "--stream"]):
            status, _, err = baton("submit", "-f", str(source), *others, router=router)
            assert (status, reason in err) == (1, True)
    status, _, err = baton("submit", "-f", str(tmp_path / "in.jsonl"), "-o", "/no/such/folder", router=router)
    assert status == 1
    assert "Cannot write" in err


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_the_server_chooses_the_service_tier_by_default(baton, router, flags):
    assert baton("submit", "hello", *flags, router=router)[0] == 0
    assert baton("submit", "hello", "--service-tier", "batch", *flags, router=router)[0] == 0
    assert [body.get("service_tier") for body in router.bodies] == [None, "batch"]


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
        (["--detach"], "--detach requires --file"),
    ],
)
def test_options_without_effect_are_refused(baton, router, options, said):
    status, _, err = baton("submit", "hello", *options, router=router)
    assert status == 2
    assert said in err
    assert not router.bodies

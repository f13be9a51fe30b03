"""What `baton submit` sends of its options, and files that cannot be written to their end."""

import io
import json

import pytest

from cluster.cli_submit import _Batch
from tests.unit.cluster.command_line import baton, environment, router

__all__ = ["baton", "environment", "router"]  # fixtures


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_line_limits_its_answer_by_either_name(baton, router, tmp_path, limit):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "a", limit: 7}) + '\n{"prompt": "b"}\n')
    arguments = ("-f", str(source), "-o", str(tmp_path / "out.jsonl"), "--concurrency", "1", "--max-tokens", "99")
    assert baton("submit", *arguments, router=router)[0] == 0
    names = ("max_tokens", "max_completion_tokens")
    limits = [{name: body[name] for name in names if name in body} for body in router.bodies]
    assert limits == [{limit: 7}, {"max_tokens": 99}]


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_the_service_tier_is_the_servers_unless_one_is_chosen(baton, router, flags):
    assert baton("submit", "hello", *flags, router=router)[0] == 0
    assert baton("submit", "hello", "--service-tier", "batch", *flags, router=router)[0] == 0
    assert [body.get("service_tier") for body in router.bodies] == [None, "batch"]


def test_a_line_may_choose_another_service_tier(baton, router, tmp_path):
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
def test_options_of_sampling_are_not_made_void_by_a_default(baton, router, options, temperature):
    assert baton("submit", "hello", *options, router=router)[0] == 0
    assert router.bodies[-1].get("temperature") == temperature


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "0", "--top-p", "0.9"], "do nothing at --temperature 0"),
        (["--temperature", "0", "--seed", "1"], "do nothing at --temperature 0"),
        (["--concurrency", "4"], "--concurrency goes with --file"),
    ],
)
def test_options_that_would_do_nothing_are_refused(baton, router, options, said):
    status, _, err = baton("submit", "hello", *options, router=router)
    assert status == 2
    assert said in err
    assert not router.bodies


async def test_what_cannot_be_written_is_raised_as_it_is():
    """No group of exceptions, which nobody looks into, also where the file can be closed afterwards."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    batch = _Batch(None, "m", {}, True, Full(), 3, lambda done, total: None)
    with pytest.raises(OSError, match="No space left"):
        await batch.run([(number, "not JSON") for number in range(3)], concurrency=3)

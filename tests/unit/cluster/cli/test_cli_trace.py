"""``baton trace export``."""

import json

from tests.unit.cluster.command_line import baton, environment, router

__all__ = ["baton", "environment", "router"]  # fixtures

REQUESTS = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 40, "input_length": 520, "output_length": 6, "hash_ids": [0, 2]},
]


def test_a_trace_is_printed_or_written_line_by_line(baton, router, tmp_path):
    router.admin_answers["/admin/trace"] = {"requests": REQUESTS}
    status, out, _ = baton("trace", "export", router=router)
    assert status == 0
    assert [json.loads(line) for line in out.splitlines()] == REQUESTS
    file = tmp_path / "trace.jsonl"
    status, written, err = baton("trace", "export", "--out", str(file), router=router)
    assert (status, written) == (0, "")
    assert file.read_text(encoding="utf-8") == out
    assert f"wrote 2 requests to {file}" in err.replace("\n", "")


def test_a_file_that_cannot_be_written_is_named(baton, router, tmp_path):
    router.admin_answers["/admin/trace"] = {"requests": REQUESTS}
    (tmp_path / "file").touch()
    status, _, err = baton("trace", "export", "--out", str(tmp_path / "file" / "trace.jsonl"), router=router)
    assert status == 1
    assert "Give a file in a writable folder." in err

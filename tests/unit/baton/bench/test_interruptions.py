"""Ctrl-C before the first result shows what is known and no empty table."""

import json

import pytest

from tests.reference_server import Schedule
from tests.unit.baton.bench.test_command import bench, reference

__all__ = ["reference"]  # a fixture

SLOW = Schedule(0.1, 0.1)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two"}\n')
    return ("--prompts", file, "--output", 600, "--warmup-requests", 0)


@pytest.mark.parametrize(
    ("concurrency", "said"),
    [
        ("1", "interrupted before the only stage had a result: nothing was measured"),
        ("1,2,4", "interrupted before the first of 3 stages had a result: nothing was measured"),
    ],
)
def test_a_run_without_figures_shows_no_table(reference, prompts, tmp_path, capsys, concurrency, said):
    url = reference(SLOW, interrupt_after=2)  # the first one settles how the server is talked to
    arguments = ("--concurrency", concurrency, *prompts, "--json", tmp_path / "a.json")
    assert bench("serve", "--url", url, *arguments) == 130
    assert capsys.readouterr().out == f"{said}\n"
    assert json.loads((tmp_path / "a.json").read_text())["stages"] == []


def test_a_stage_without_figures_is_left_out(reference, prompts, capsys):
    url = reference(Schedule(0.001, 0.001), interrupt_after=5)
    arguments = ("--concurrency", "1,2", *prompts, "--requests", 3)
    assert bench("serve", "--url", url, *arguments) == 130
    shown = capsys.readouterr().out
    assert "1 at once" in shown
    assert "2 at once" not in shown
    assert "interrupted: 1 of 2 stages have no results" in shown


def test_a_sweep_without_a_verdict_shows_no_table(reference, prompts, capsys):
    url = reference(SLOW, interrupt_after=2)
    assert bench("sweep", "--slo", "ttft=1s", "--start-rate", 20, "--url", url, *prompts) == 130
    shown = capsys.readouterr().out
    assert shown == "The search was interrupted before any rate had a verdict, so the goodput is unknown.\n"

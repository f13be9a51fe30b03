"""The verdict on a job beside interactive requests, and the load."""

from __future__ import annotations

import json

import pytest

from benchmarks.job_interference import Half, Load, Round, is_met, show

LOAD = Load(rate=20.0, seconds=10.0, tokens=8, words=30, line_tokens=16, num_lines=50)


def half(ttft_s: float, num_failed: int = 0, num_lines: int = 0) -> Half:
    return Half([ttft_s] * 20, num_failed, num_lines, 10.0)


def beside(ttft_s: float, num_failed: int = 0, num_lines: int = 50) -> Round:
    return Round(half(0.1), half(ttft_s, num_failed, num_lines))


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([beside(0.1), beside(0.11), beside(0.5)], True),  # the median counts
        ([beside(0.1), beside(0.12), beside(0.12)], False),
        ([beside(0.1), beside(0.1, num_failed=1)], False),
        ([beside(0.1), beside(0.1, num_lines=0)], False),  # the job did not run
    ],
)
def test_the_bar_is_for_the_median_of_complete_measurements(rounds: list[Round], expected: bool) -> None:
    assert is_met(rounds) is expected


def test_the_table_has_a_row_for_each_round_and_the_medians() -> None:
    table = show([beside(0.1), beside(0.12)])
    assert table.row_count == 3
    assert list(table.columns[7].cells) == ["1.00 x", "1.20 x", "1.10 x"]


def test_halves_of_a_round_differ_in_their_words_alone() -> None:
    without, later = LOAD.requests(1, "without"), LOAD.requests(1, "beside")
    assert [spec.at_s for spec in without] == [spec.at_s for spec in later]
    assert [len(spec.prompt.split()) for spec in without] == [len(spec.prompt.split()) for spec in later]
    assert not {spec.prompt for spec in without} & {spec.prompt for spec in later}
    assert [spec.at_s for spec in LOAD.requests(2, "without")] != [spec.at_s for spec in without]


def test_lines_are_valid_requests_with_ids_of_their_own() -> None:
    found = [json.loads(text) for text in LOAD.lines(1, "tiny").splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found) == 50
    assert found[0]["body"]["model"] == "tiny"
    assert found[0]["body"]["max_tokens"] == 16

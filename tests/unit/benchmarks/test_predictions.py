"""What the benchmark of predictions makes of timelines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.predictions import Outcome, errors_of, hindsight_errors_of, make_prompts, outcome_of, render


def test_an_outcome_compares_what_was_predicted_with_what_happened() -> None:
    events = [{"name": "received", "at_ms": 0.0}, {"name": "first_token", "at_ms": 80.0}]
    timeline = {
        "events": [*events, {"name": "finished", "at_ms": 280.0}],
        "attributes": {
            "prompt_tokens": 30,
            "output_tokens": 11,
            "predicted_ttft_ms": 100.0,
            "predicted_tpot_ms": 15.0,
        },
    }
    found = outcome_of(timeline)
    assert found == Outcome(30, 11, 80.0, 100.0, 20.0, 15.0)
    assert outcome_of({"sequences": [timeline]}) == found
    errors = errors_of([found, Outcome(1, 1, 50.0, 50.0, None, 15.0)])
    assert errors["TTFT"] == pytest.approx([0.25, 0.0])
    assert errors["TPOT"] == pytest.approx([-0.25])


def test_the_table_tells_the_first_requests_from_the_others() -> None:
    outcomes = [Outcome(1, 9, 100.0, 150.0, 10.0, 10.0)] * 2 + [Outcome(1, 9, 100.0, 95.0, 10.0, 11.0)] * 3
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(outcomes, warm_up=2))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["first", "2", "TTFT", "50.0%", "50.0%", "+50.0%", "0.0%", "100.0", "ms"] in rows
    assert ["after", "2", "TTFT", "5.0%", "5.0%", "-5.0%", "0.0%", "100.0", "ms"] in rows
    assert ["after", "2", "TPOT", "10.0%", "10.0%", "+10.0%", "0.0%", "10.0", "ms"] in rows


def test_hindsight_knows_the_others_but_not_the_request_itself() -> None:
    """TTFT by prompt length, whatever the order; TPOT by the order, whatever the length."""
    short, long = Outcome(10, 9, 100.0, 0.0, 10.0, 0.0), Outcome(500, 9, 400.0, 0.0, 10.0, 0.0)
    odd = Outcome(500, 9, 800.0, 0.0, 40.0, 0.0)
    found = hindsight_errors_of([*[short, long] * 20, odd])
    assert found["TTFT"][:40] == [0.0] * 40
    assert found["TTFT"][40] == pytest.approx(-0.5)
    assert found["TPOT"] == [*[0.0] * 40, pytest.approx(-0.75)]
    assert hindsight_errors_of([odd]) == {"TTFT": [], "TPOT": []}


def test_prompts_are_the_same_for_a_seed_and_never_begin_alike() -> None:
    prompts = make_prompts(40, seed=3)
    assert prompts == make_prompts(40, seed=3)
    assert len({prompt[:8] for prompt in prompts}) == 40

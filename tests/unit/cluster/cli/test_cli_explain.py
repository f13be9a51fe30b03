"""``baton explain``: what it prints, piped and narrow, and how it fails."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from baton.core.slo import STANDARD, SloResult, SloVerdict, target_attributes
from baton.core.timeline import Timeline
from baton.explain.timelines import TimelineStore
from cluster.cli import cli
from cluster.cli.cli_explain import render_timeline
from tests.unit.baton.explain.test_critical_path import served
from tests.unit.cluster.fake_router import FakeRouter, running


@pytest.fixture
def timeline() -> dict[str, Any]:
    return shown_by_the_router(served())


def shown_by_the_router(timeline: Timeline) -> dict[str, Any]:
    timeline.attributes |= {
        "prompt_tokens": 14, "cached_tokens": 2, "output_tokens": 3, "outcome": "length", "prefill_worker": "prefill-0",
        "decode_worker": "decode-1", "drafted_tokens": 8, "accepted_tokens": 5,
    }  # fmt: skip
    store = TimelineStore(10)
    store.add(timeline)
    answer: dict[str, Any] = json.loads(json.dumps(store.find(timeline.request_id)))
    return answer


def printed(timeline: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_timeline(timeline, width))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_waterfall_fits_and_has_every_stage_and_both_verdicts(timeline: dict[str, Any], width: int) -> None:
    text = printed(timeline, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text, "a pipe gets no colours"
    for stage in timeline["stages"]:
        assert stage["name"].replace("_", " ") in text
    assert "The first token took" in text
    assert "KV transfer" in text
    assert "prefill-0 → decode-1" in text
    assert "SLO" not in text, "this timeline names no class"


def test_the_explanation_reports_whether_the_targets_were_met(timeline: dict[str, Any]) -> None:
    timeline["attributes"] |= target_attributes(STANDARD) | SloVerdict(SloResult.MISSED_TTFT, -0.5, 0.06).attributes()
    text = " ".join(printed(timeline, 200).split())
    assert "SLO class standard missed: TTFT 3.5 s, 500 ms over the target of 3 s; TPOT 40 ms, 60 ms under" in text


def test_the_explanation_reports_why_a_request_was_refused_or_failed(timeline: dict[str, Any]) -> None:
    timeline["attributes"] |= {"outcome": "rejected", "error_message": "There is no room for class interactive."}
    text = printed(timeline, 80)
    assert ": rejected\n" in text
    assert "\nThere is no room for class interactive." in text


def test_the_explanation_names_the_speculation_method(timeline: dict[str, Any]) -> None:
    assert "5 of 8 drafts accepted\n" in printed(timeline, 200), "an older worker names no method"
    timeline["drafts"] = {"suffix": {"drafted_tokens": 8, "accepted_tokens": 5}}
    assert "5 of 8 drafts accepted (by suffix)\n" in printed(timeline, 200)
    timeline["drafts"] = {
        "suffix": {"drafted_tokens": 2, "accepted_tokens": 0}, "eagle3": {"drafted_tokens": 6, "accepted_tokens": 5},
    }  # fmt: skip
    assert "5 of 8 drafts accepted (eagle3 5 of 6, suffix 0 of 2)\n" in printed(timeline, 200)
    del timeline["drafts"]
    assert "5 of 8 drafts accepted\n" in printed(timeline, 200), "and an older router nothing of it"


def test_bars_are_at_the_time_they_show(timeline: dict[str, Any]) -> None:
    lines = printed(timeline, 100).splitlines()
    bars = {line[:20].strip(): (line.find("━"), line.count("━")) for line in lines if "━" in line}
    assert bars["accept"][0] < bars["prefill"][0] < bars["decode"][0] < bars["send"][0]
    assert bars["prefill"][1] > bars["accept"][1] >= 1


def test_choices_are_shown_one_below_the_other(timeline: dict[str, Any]) -> None:
    text = printed({"request_id": "r", "sequences": [{**timeline, "request_id": f"r-{n}"} for n in range(2)]}, 80)
    assert text.index("r-0: length") < text.index("r-1: length")


def test_a_running_request_has_no_verdict() -> None:
    store = TimelineStore(1)
    store.add(Timeline("r"))
    assert "still running" in printed(store.find("r"), 80)


@pytest.fixture
def router(timeline: dict[str, Any]) -> Iterator[FakeRouter]:
    with running() as fake:
        fake.timelines["r"] = timeline
        yield fake


def explain(router: FakeRouter, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["explain", *arguments, "--endpoint", router.endpoint])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("which", ["r", "--last", "--slowest"])
def test_the_command_finds_the_request(router: FakeRouter, capsys: pytest.CaptureFixture[str], which: str) -> None:
    code, out, _ = explain(router, capsys, which)
    assert code == 0
    assert out.startswith("r: length")


def test_json_is_the_answer_of_the_router(
    router: FakeRouter, capsys: pytest.CaptureFixture[str], timeline: dict[str, Any]
) -> None:
    code, out, _ = explain(router, capsys, "r", "--json")
    assert code == 0
    assert json.loads(out) == timeline


def test_an_unknown_id_gives_one_message(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(router, capsys, "nobody")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_without_requests_there_is_nothing_to_explain(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.timelines.clear()
    code, _, err = explain(router, capsys, "--last")
    assert code == 1
    assert "The router has no timelines" in err


def test_a_hint_with_a_key_says_how_to_change_it(timeline: dict[str, Any]) -> None:
    timeline["slowest_gap"]["hint"] = "Use routing.local_prefill: never."
    assert "since `baton upgrade` refuses it" in " ".join(printed(timeline, 80).split())


@pytest.mark.parametrize("which", ["--last", "--slowest", "--slowest-first-token"])
def test_a_running_request_is_not_chosen(
    router: FakeRouter, capsys: pytest.CaptureFixture[str], timeline: dict[str, Any], which: str
) -> None:
    """Its figures are those so far."""
    running_one = {**timeline, "request_id": "new", "attributes": {"prompt_tokens": 5}}
    router.timelines = {"new": running_one, "r": timeline}
    assert explain(router, capsys, which)[1].startswith("r: length")
    assert explain(router, capsys, "new")[1].startswith("new: still running")
    router.timelines = {"new": running_one}
    code, _, err = explain(router, capsys, which)
    assert code == 1
    assert "No request has finished: all 1 that the router lists are still running" in " ".join(err.split())
    assert "baton explain new" in " ".join(err.split())


@pytest.mark.parametrize("arguments", [[], ["r", "--last"], ["--last", "--slowest"]])
def test_explain_needs_a_request(router: FakeRouter, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, _, err = explain(router, capsys, *arguments)
    assert code == 2
    told = " ".join(err.replace("│", " ").split())
    assert "give exactly one of REQUEST_ID, --last, --slowest and --slowest-first-token" in told


def routing_record() -> dict[str, Any]:
    shared = {"tpot_ms": 21.3, "scores": {}, "cached_tokens": 0}
    return {
        "num_routes": 816,
        "num_weighed": 60,
        "candidates": [
            {**shared, "prefill": "prefill-1", "decode": "decode-0", "chosen": True, "score": 6.41, "ttft_ms": 84.2,
             "cached_tokens": 128},
            {**shared, "prefill": None, "decode": "decode-0", "chosen": False, "score": 5.5, "ttft_ms": 10_500.0,
             "lost_on": "predicted_tpot"},
        ],
        "actual": {"ttft_ms": 91.7, "tpot_ms": None},
    }  # fmt: skip


def test_routes_show_predicted_and_actual_times(timeline: dict[str, Any]) -> None:
    timeline["routing"] = routing_record()
    lines = [" ".join(line.split()) for line in printed(timeline, 120).splitlines()]
    assert "routing: 60 of 816 routes scored, with predicted times" in lines
    assert "prefill-1 → decode-0 84.2 ms 21.3 ms 6.41 chosen, 128 cached" in lines
    assert "decode-0 alone 10.5 s 21.3 ms 5.50 lost on predicted tpot" in lines
    assert "actual 91.7 ms" in lines


@pytest.mark.parametrize("width", [40, 60])
def test_routes_fit_into_narrow_terminals(timeline: dict[str, Any], width: int) -> None:
    timeline["routing"] = routing_record()
    assert all(len(line) <= width for line in printed(timeline, width).splitlines())


def test_a_router_without_routing_records_is_supported(timeline: dict[str, Any]) -> None:
    for nothing in ({}, None, {"made": "up"}):
        timeline["routing"] = nothing
        assert "routing" not in printed(timeline, 80)


TREE = {
    "method": "eagle3",
    "draft": {
        "token_ids": [1, 2, 3, 4],
        "parents": [-1, 0, 0, -1],
        "accepted": [True, False, True, False],
        "texts": [" sea", " was", " is", "\x1b"],
    },
    "output": {"token_ids": [1, 3, 5], "verdicts": ["accepted", "accepted", "bonus"], "texts": [" sea", " is", "!"]},
    "draft_ms": 1.25,
    "verify_ms": 14.8,
    "batch_sequences": 2,
}
CHAIN = {
    **TREE,
    "method": "suffix",
    "draft": {"token_ids": [1, 2], "parents": [-1, 0], "accepted": [True, False], "texts": [" a", " b"]},
    "output": {"token_ids": [1, 5], "verdicts": ["accepted", "recovered"], "texts": [" a", " c"]},
}
PLAIN = {
    **TREE,
    "method": None,
    "draft": {"token_ids": [], "parents": [], "accepted": [], "texts": []},
    "output": {"token_ids": [5], "verdicts": ["plain"], "texts": ["The"]},
    "batch_sequences": 1,
}


def test_rounds_show_chains_on_a_line_and_trees_as_trees(
    router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.timelines["r"]["speculation"] = {"rounds": [PLAIN, CHAIN, TREE], "left_out": 2}
    code, out, _ = explain(router, capsys, "r", "--rounds")
    assert code == 0
    assert [line.rstrip() for line in out.splitlines()] == [
        "r: 3 rounds",
        "",
        "1  no draft  verified in 14.8 ms with 1 sequence",
        "   → 'The'",
        "",
        "2  suffix, 1 of 2 accepted  drafted in 1.2 ms, verified in 14.8 ms with 2",
        "sequences",
        "   ✓ ' a'  ✗ ' b'",
        "   → ' a' ' c' (recovered)",
        "",
        "3  eagle3, 2 of 4 accepted  drafted in 1.2 ms, verified in 14.8 ms with 2",
        "sequences",
        "draft",
        "├── ✓ ' sea'",
        "│   ├── ✗ ' was'",
        "│   └── ✓ ' is'",
        "└── ✗ '\\x1b'",
        "   → ' sea' ' is' '!' (bonus)",
        "and 2 later rounds that the router did not keep",
    ]


def test_a_request_without_a_trace_has_no_rounds_to_show(
    router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = explain(router, capsys, "r", "--rounds")
    assert code == 1
    assert 'Send it with "speculation": {"trace": true}' in err

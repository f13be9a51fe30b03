"""The study of routing: where rates stop being kept, which replays there are, and a tiny one in virtual time."""

import io
import json

import pytest
from rich.console import Console

from benchmarks import routing_study
from benchmarks.routing_study import (
    Replay,
    Study,
    ablations,
    highest_rate,
    main,
    outcome_table,
    overloads,
    rate_replays,
    rates_line,
)
from cluster.config.config import load_config
from cluster.routing.routing_config import DEFAULT_WEIGHTS


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(1, 0.99), (2, 0.95), (4, 0.85)], 3.0),
        ([(1, 0.8), (2, 0.7)], None),
        ([(1, 0.99), (2, 0.91)], 2),
        ([(1, 0.89), (2, 0.95), (3, 0.85)], 2.5),  # a dip before it is chance
        ([], None),
    ],
)
def test_the_highest_rate_lies_where_attainment_falls_below_the_objective(points, rate):
    assert highest_rate(points) == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ([(2, 0.95), (4, 0.85)], [(2, 0.99), (8, 0.95), (10, 0.85)], "round_robin 3.0, baton 9.0; 3.00 times as many."),
        ([(2, 0.8)], [(2, 0.99), (8, 0.95)], "round_robin below 2.0, baton at least 8.0; at least 4.00 times as many."),
        ([(2, 0.8)], [(2, 0.99), (4, 0.81)], "round_robin below 2.0, baton 3.0; at least 1.50 times as many."),
        ([(2, 0.95), (4, 0.85)], [(2, 0.8)], "round_robin 3.0, baton below 2.0."),
        ([(2, 0.95)], [(2, 0.99)], "round_robin at least 2.0, baton at least 2.0."),
    ],
)
def test_the_rates_are_told_even_where_they_lie_outside_of_those_that_were_tried(theirs, ours, said):
    assert rates_line({"round_robin": theirs, "baton": ours}).endswith(said)


def test_every_replay_is_a_configuration():
    replays = [*rate_replays([1.0, 2.0]), *ablations(1.0), *overloads(1.0)]
    for wanted in replays:
        load_config(None, wanted.overrides)
    labels = [wanted.label for wanted in ablations(1.0)]
    assert len(labels) == len(set(labels))
    assert {f"without {name}" for name, weight in DEFAULT_WEIGHTS.items() if weight} <= set(labels)
    assert [wanted.scale for wanted in overloads(2.0)] == [2.0, 4.0, 6.0, 6.0]


def write_trace(folder, count):
    file = folder / "trace.jsonl"
    lines = [
        {"timestamp": 100 * index, "input_length": 600, "output_length": 8, "hash_ids": [index % 3, 10 + index]}
        for index in range(count)
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("prefill: {workers: 2}\ndecode: {workers: 2}\n", encoding="utf-8")
    return file


def test_a_replay_counts_the_requests_behind_the_warm_up(tmp_path, config):
    study = Study(write_trace(tmp_path, 30), config, num_requests=20, warmup_requests=10, seed=0)
    document = study.run(Replay("mix", 1.0, {}, {"interactive": 1.0, "batch": 1.0}))
    classes = document["classes"]
    assert classes["all"]["requests"] == 20 == classes["interactive"]["requests"] + classes["batch"]["requests"]
    assert classes["all"]["attainment"] == 1.0
    console = Console(file=io.StringIO(), width=200)
    console.print(outcome_table("mix", [(Replay("mix", 1.0, {}, {"interactive": 1, "batch": 1}), document)]))
    text = console.file.getvalue()
    assert "interactive" in text
    assert "batch" in text
    assert "100.0 %" in text


def test_the_command_writes_what_it_shows(tmp_path, config, capsys):
    out = tmp_path / "out.json"
    options = f"--trace {write_trace(tmp_path, 12)} -c {config} --parts rates --scales 2,1 --requests 8 --warm-up 2"
    main([*options.split(), "--json", str(out)])
    shown = capsys.readouterr().out
    assert "with 90% attainment: round_robin" in shown
    rows = json.loads(out.read_text())["rates"]
    assert [(row["label"], row["scale"]) for row in rows] == [
        ("round_robin", 1.0),
        ("round_robin", 2.0),
        ("baton", 1.0),
        ("baton", 2.0),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parts", "rates,overlod"], "Did you mean overload?"),
        (["--scales", "1,x"], "--scales"),
        (["--scales", "0"], "--scales"),
        (["--requests", "0"], "--requests"),
        (["--trace", "/nowhere/trace.jsonl"], "cannot read /nowhere/trace.jsonl"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(tmp_path, options, said, capsys, monkeypatch):
    monkeypatch.setattr(routing_study, "_run_all", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["--trace", str(write_trace(tmp_path, 5)), *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

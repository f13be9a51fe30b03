"""Routing on a real cluster: prompts, what is read from the router's metrics, and the table. No cluster is started."""

import io
import json

import pytest
from prometheus_client import generate_latest
from rich.console import Console
from typer.main import get_command

from baton.bench.lengths import parse_lengths
from baton.core.slo import STANDARD
from benchmarks import routing_runs
from benchmarks.routing_runs import (
    ROUTERS,
    Outcome,
    Run,
    counter,
    load_options,
    main,
    median_of,
    prefix_heavy_prompts,
    read_outcome,
    render,
)
from cluster.cli.cli import app
from cluster.config.config import load_config
from cluster.telemetry.metrics import RouterMetrics

STAGE = {
    "latencies": {"ttft_ms": {"p50": 100.0}, "tpot_ms": {"p50": 10.0}, "itl_ms": {"p99": 30.0}},
    "throughput": {"output_tokens_per_s": 50.0},
    "num_failed": 2,
}
OUTCOME = Outcome(100.0, 10.0, 30.0, 50.0, pairs=3, local=2, refused=1, cached_share=0.25, failed=2)


def test_every_router_is_a_configuration():
    for overrides in ROUTERS.values():
        load_config(None, overrides)
    assert "round-robin" in ROUTERS  # the yardstick of the table


def test_prompts_share_a_few_documents_and_are_the_same_again():
    prompts = prefix_heavy_prompts(40, seed=1)
    assert prompts == prefix_heavy_prompts(40, seed=1)
    assert len(set(prompts)) == 40
    assert 1 < len({prompt.split("\n\nQuestion")[0] for prompt in prompts}) <= 6


def test_the_load_has_as_many_prompts_as_it_needs(tmp_path):
    options = load_options("prefix-heavy", 7, tmp_path)
    lines = (tmp_path / "prompts.jsonl").read_text("utf-8").splitlines()
    assert options[:2] == ["--prompts", str(tmp_path / "prompts.jsonl")]
    assert len([json.loads(line)["prompt"] for line in lines]) == 7


@pytest.mark.parametrize("workload", routing_runs.WORKLOADS)
def test_the_load_tool_takes_the_options(workload, tmp_path):
    """It would say so only when a cluster is there."""
    options = load_options(workload, 7, tmp_path)
    given = dict(zip(options[::2], options[1::2], strict=True))
    known = get_command(app).commands["bench"].commands["serve"].params
    assert set(given) <= {name for param in known for name in param.opts}
    for name in {"--input", "--output"} & set(given):
        parse_lengths(name, given[name])


def test_a_counter_is_the_sum_of_the_series_that_match():
    page = 'a_total{kind="x"} 2.0\na_total{kind="y"} 3.0\na_total_other 7.0\nb_total 5.0\n'
    assert counter(page, "a_total") == 5
    assert counter(page, "a_total", 'kind="y"') == 3
    assert counter(page, "b_total") == 5
    assert counter(page, "c_total") == 0


def test_decisions_are_read_from_the_page_that_a_router_serves():
    metrics = RouterMetrics((STANDARD,))
    for local in (True, True, False):
        metrics.routing.observe_route(local=local)
    metrics.admission.observe_refusal(STANDARD, "decode_seats")
    metrics.prompt_tokens.inc(80)
    metrics.cached_tokens.inc(20)
    outcome = read_outcome(STAGE, generate_latest(metrics.registry).decode())
    assert outcome == Outcome(100.0, 10.0, 30.0, 50.0, pairs=1, local=2, refused=1, cached_share=0.25, failed=2)


def test_medians_are_taken_figure_by_figure():
    others = [Outcome(value, 10.0, 30.0, 50.0, 3, 2, 1, 0.25, 0) for value in (300.0, 110.0)]
    assert median_of([OUTCOME, *others]).ttft_ms == 110.0


def test_gains_are_ratios_to_round_robin():
    slow = Outcome(250.0, 10.0, 30.0, 40.0, 5, 0, 0, 0.0, 0)
    runs = {Run((1, 1), "baton", "mixed"): OUTCOME, Run((1, 1), "round-robin", "mixed"): slow}
    console = Console(file=io.StringIO(), width=200)
    console.print(render(runs))
    ours, theirs = (line for line in console.file.getvalue().splitlines() if "mixed" in line)
    assert "2.50" in ours
    assert "1.25" in ours
    assert theirs.count("1.00") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pools", "1+1,2"], "--pools takes prefill+decode workers"),
        (["--workloads", "mixd"], "Did you mean mixed?"),
        (["--routers", "baton,round"], "Did you mean round-robin?"),
        (["--requests", "0"], "--requests"),
        (["--json", "/dev/null/a.json"], "--json cannot be written"),
    ],
)
def test_wrong_options_are_refused_before_a_cluster_starts(options, said, capsys, monkeypatch):
    monkeypatch.setattr(routing_runs, "measure", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_run_is_measured_as_often_as_asked_and_written_down(tmp_path, capsys, monkeypatch):
    measured = []
    monkeypatch.setattr(routing_runs, "measure", lambda run, *_: measured.append(run) or OUTCOME)
    out = tmp_path / "out.json"
    main(["--pools", "1+1", "--workloads", "mixed", "--repeat", "2", "--json", str(out)])
    assert len(measured) == 2 * len(ROUTERS)
    assert measured[0] == Run((1, 1), "baton", "mixed")
    rows = json.loads(out.read_text())
    assert [row["router"] for row in rows] == list(ROUTERS)
    assert rows[0]["outcomes"] == [{name: getattr(OUTCOME, name) for name in Outcome.__slots__}] * 2
    assert "no prefix affinity" in capsys.readouterr().out

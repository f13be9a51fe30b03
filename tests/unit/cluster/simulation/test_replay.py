"""The real router over simulated workers, in virtual time."""

import json

import pytest
from rich.console import Console

from baton.bench.latency import Summary
from baton.bench.traces import TraceRequest
from baton.core.errors import ConfigError
from cluster.config.config import BatonConfig
from cluster.simulation.compare import compare, comparison_table, measured_requests, read_stage
from cluster.simulation.entry import fit_profile, simulate
from cluster.simulation.options import SimulateOptions
from cluster.simulation.replay import ReplaySettings, replay
from cluster.simulation.report import percentiles, table
from cluster.simulation.workload import make_arrivals
from tests.simulated import make_profile

CONFIG = {"prefill": {"workers": 2}, "decode": {"workers": 3, "kv_blocks": 512}}
TRACE = [TraceRequest(0.2 * index, 200 + 7 * (index % 30), 10 + index % 50, (index % 4,)) for index in range(120)]


def run(rate=1.0, settings=None, trace=TRACE, **config):
    arrivals = make_arrivals(trace, rate_scale=rate, shares={"standard": 1, "interactive": 1}, max_tokens=2000)
    return replay(BatonConfig.from_dict({**CONFIG, **config}), make_profile(), arrivals, settings or ReplaySettings())


def test_every_request_is_answered_and_counted():
    result = run()
    classes = result.document["classes"]
    assert classes["all"]["requests"] == 120 == classes["standard"]["requests"] + classes["interactive"]["requests"]
    assert classes["all"]["finished"] == 120
    assert classes["all"]["failed"] == 0
    assert classes["all"]["output_tokens"] == sum(request.output_tokens for request in TRACE)
    assert 0 < classes["all"]["ttft_ms"]["p50"] < classes["all"]["ttft_ms"]["p99"]
    assert classes["all"]["attainment"] > 0.9
    assert classes["all"]["cached_share"] > 0.2
    hours = result.document["worker_hours"]
    assert hours["decode"] == pytest.approx(1.5 * hours["prefill"], rel=1e-2)
    assert json.loads(json.dumps(result.document)) == result.document


def test_a_replay_can_be_repeated():
    first, second = run(rate=3.0), run(rate=3.0)
    for result in (first, second):
        del result.document["replay"]["wall_s"]
    assert first.document == second.document


def test_requests_during_the_warmup_are_left_out():
    result = run(settings=ReplaySettings(warmup_s=12.0))
    assert result.document["classes"]["all"]["requests"] == 60


def test_overload_misses_targets_or_is_refused():
    easy, hard = run(), run(rate=30.0)
    assert hard.document["classes"]["all"]["attainment"] < easy.document["classes"]["all"]["attainment"]


def test_a_replay_that_misses_too_much_stops_early():
    whole, broken_off = run(rate=30.0), run(rate=30.0, settings=ReplaySettings(max_missed=10))
    missed = [request for request in broken_off.requests if request.is_met is False]
    assert len(missed) > 10
    assert len(broken_off.requests) < len(whole.requests)
    assert broken_off.document["replay"]["virtual_s"] < whole.document["replay"]["virtual_s"]
    lenient = run(rate=30.0, settings=ReplaySettings(max_missed=120))
    assert [request.is_met for request in lenient.requests] == [request.is_met for request in whole.requests]


def test_the_table_has_a_row_for_each_class():
    console = Console(width=200, record=True)
    console.print(table(run().document))
    text = console.export_text()
    assert "interactive" in text
    assert "standard" in text


def write_trace(file):
    lines = [
        {"timestamp": 200 * index, "input_length": 300, "output_length": 20, "hash_ids": [0, index]}
        for index in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def test_the_command_replays_a_file(tmp_path):
    said = []
    options = {
        "trace": write_trace(tmp_path / "trace.jsonl"),
        "assignments": ["prefill.workers=2", "decode.workers=2"],
        "router": "round_robin",
        "slo_class": "interactive",
        "json_file": tmp_path / "out.json",
    }
    simulate(SimulateOptions(**options), said.append)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["classes"]["interactive"]["finished"] == 40
    assert document["settings"]["config"]["routing"]["picker"] == "round_robin"
    assert "replaying 40 requests" in said
    assert document["settings"]["trace_format"] == "auto"


def test_the_replayed_part_of_a_trace_and_truncated_prompts_are_reported(tmp_path):
    said, file = [], tmp_path / "out.json"
    options = {
        "trace": write_trace(tmp_path / "trace.jsonl"),
        "trace_format": "mooncake",
        "trace_start_s": 2.0,
        "trace_seconds": 4.0,
        "assignments": ["max_model_len=256"],
        "json_file": file,
    }
    simulate(SimulateOptions(**options), said.append)
    document = json.loads(file.read_text())
    told = {name: document["settings"][name] for name in ("trace_format", "trace_start_s", "trace_seconds", "stage")}
    assert told == {"trace_format": "mooncake", "trace_start_s": 2.0, "trace_seconds": 4.0, "stage": None}
    assert document["replay"]["cut_prompts"] == document["classes"]["all"]["requests"] == 20
    assert "20 of 20 prompts are shortened: they do not fit into the context with their answers" in said


@pytest.mark.parametrize(
    ("options", "is_told"),
    [({}, True), ({"profile": "h100-8b"}, False), ({"assignments": ["simulation.profile=h100-70b-tp4"]}, False)],
)
def test_the_default_profile_is_reported(tmp_path, options, is_told):
    said = []
    simulate(SimulateOptions(**{"trace": write_trace(tmp_path / "trace.jsonl"), "requests": 2, **options}), said.append)
    told = [line for line in said if "no profile is given, so workers use h100-8b" in line]
    assert len(told) == is_told
    assert all("--profile or simulation.profile: h100-70b-tp4, h100-8b, or a YAML file" in line for line in told)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"router": "round_robbin"}, "Did you mean round_robin"),
        ({"slo_class": "interactiv"}, "Did you mean interactive"),
        ({"profile": "h100"}, "h100-8b"),
        ({"trace": None}, "--trace FILE"),
        (
            {"warmup_s": 60.0},
            r"--warmup 60 leaves out every request: the last one arrives after 7\.8 s of virtual time",
        ),
        ({"stage": "1"}, "--stage names a stage of the report of --compare-with"),
        ({"with_samples": True}, "--samples writes every request to the file of --json"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        simulate(SimulateOptions(**{"trace": write_trace(tmp_path / "trace.jsonl"), **options}), lambda _: None)


def test_options_that_change_a_trace_are_refused_without_one(tmp_path):
    file = tmp_path / "real.json"
    file.write_text(json.dumps(make_report([make_sample(index) for index in range(3)])), encoding="utf-8")
    options = {"compare_with": file, "rate_scale": "0=1,60=4", "requests": 10, "slo_class": "interactive=1,batch=1"}
    with pytest.raises(ConfigError, match=r"so --rate-scale, --requests, --class with shares cannot be used"):
        simulate(SimulateOptions(**options), lambda _: None)


def test_percentiles_match_those_of_the_load_tool():
    """Otherwise a comparison with a real run would show differences that do not exist."""
    seconds = [0.1, None, 0.4, 0.2, 0.9, 0.3]
    measured = Summary.of_seconds(seconds)
    simulated = percentiles([None if value is None else 1e3 * value for value in seconds])
    assert [simulated[name] for name in ("p50", "p95", "p99", "mean")] == pytest.approx(
        [measured.p50, measured.p95, measured.p99, measured.mean]
    )
    assert percentiles([None]) is None


def make_report(samples):
    summary = {"p50": 100.0, "p95": 200.0, "p99": 300.0, "mean": 110.0}
    stage = {
        "label": "1",
        "latencies": {"ttft_ms": summary, "tpot_ms": summary},
        "goodput": {"attainment": 0.5, "requests_per_s": 2.0},
        "samples": samples,
    }
    slo = {"ttft_ms": 1000.0, "tpot_ms": None, "e2e_ms": None}
    return {"format": "baton-bench-serve", "version": 2, "settings": {"slo": slo}, "stages": [stage]}


def make_sample(index):
    return {
        "intended_s": 3.0 + 0.3 * index,
        "input_tokens": 100,
        "output_tokens": 20,
        "cached_tokens": 32,
        "is_warmup": index < 5,
    }


def test_a_real_run_is_simulated_and_compared(tmp_path):
    file, out = tmp_path / "report.json", tmp_path / "out.json"
    file.write_text(json.dumps(make_report([make_sample(index) for index in range(30)])), encoding="utf-8")
    simulate(SimulateOptions(compare_with=file, json_file=out), lambda _: None)
    document = json.loads(out.read_text())
    assert document["classes"]["standard"]["requests"] == 25
    ttft = document["comparison"]["ttft_ms p50"]
    assert ttft["measured"] == 100.0
    assert ttft["error"] == pytest.approx((ttft["simulated"] - 100) / 100, abs=1e-3)
    assert document["comparison"]["attainment"] == {"measured": 0.5, "simulated": 1.0, "error": 1.0}
    Console(quiet=True).print(comparison_table(document["comparison"]))


def test_failed_requests_are_resent_and_those_of_unknown_length_are_counted(tmp_path):
    failed = {"input_tokens": None, "output_tokens": 3, "cached_tokens": 0, "wanted_output": 40, "error": "http_429"}
    samples = [make_sample(index) for index in range(10)]
    samples += [{**make_sample(10), **failed, "wanted_input": wanted} for wanted in (150, None)]
    requests, num_left_out = measured_requests({"samples": samples})
    assert (len(requests), num_left_out) == (11, 1)
    assert (requests[-1].input_tokens, requests[-1].output_tokens) == (150, 40)
    file, said = tmp_path / "report.json", []
    file.write_text(json.dumps(make_report(samples)), encoding="utf-8")
    simulate(SimulateOptions(compare_with=file, json_file=tmp_path / "out.json"), said.append)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["settings"]["compare_with"] == str(file)
    assert document["classes"]["standard"]["requests"] == 6
    assert "1 requests of the real run are left out, because their lengths are unknown" in said


def test_a_report_without_samples_needs_a_trace(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(make_report([])), encoding="utf-8")
    with pytest.raises(ConfigError, match="--samples"):
        simulate(SimulateOptions(compare_with=file), lambda _: None)
    figures = compare(read_stage(file), run().requests, 24.0)
    assert figures["goodput 1/s"]["simulated"] == pytest.approx(5.0, rel=0.1)
    with pytest.raises(ConfigError, match="--stage"):
        read_stage(file, "7")
    file.write_text("# Not a report", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a report of `baton bench serve --json`: it is not JSON"):
        read_stage(file)


def test_a_profile_is_written_only_after_learning_something(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="There are no measurements"):
        fit_profile(SimulateOptions(profile="h100-8b"), tmp_path / "mine.yaml")


def test_fitting_refuses_options_without_effect(tmp_path):
    options = {"profile": "h100-8b", "trace": tmp_path, "rate_scale": "2", "with_samples": True}
    with pytest.raises(ConfigError, match="leave out --trace, --rate-scale, --samples"):
        fit_profile(SimulateOptions(**options), tmp_path / "mine.yaml")


def test_pools_grow_and_shrink_with_the_load():
    quiet = [TraceRequest(4.0 * index, 300, 20) for index in range(15)]
    busy = [TraceRequest(60 + 0.04 * index, 300, 60) for index in range(500)]
    calm = [TraceRequest(80 + 4.0 * index, 300, 20) for index in range(40)]
    limits = {"enabled": True, "prefill": {"min": 1, "max": 8}, "decode": {"min": 1, "max": 8}, "calm": 20.0}
    profile_changes = {"start_s": 5.0}
    arrivals = make_arrivals(quiet + busy + calm, shares={"standard": 1}, max_tokens=2000)
    config = BatonConfig.from_dict(
        {"prefill": {"workers": 1}, "decode": {"workers": 1, "kv_blocks": 512}, "autoscaler": limits}
    )
    document = replay(config, make_profile(**profile_changes), arrivals, ReplaySettings()).document
    assert document["classes"]["all"]["failed"] == 0
    hours, always = document["worker_hours"], document["replay"]["virtual_s"] / 3600
    assert sum(hours.values()) > 2.1 * always  # there were more than at the start
    assert document["workers"]["prefill"] + document["workers"]["decode"] < 6  # and most of them are gone

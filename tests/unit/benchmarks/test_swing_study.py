"""The study of swings: its search, its sums, and a tiny one from end to end in virtual time."""

import io
import json
from itertools import pairwise

import pytest
from rich.console import Console

from baton.bench.traces import TraceRequest
from baton.core.errors import ConfigError
from benchmarks import swing_study
from benchmarks.swing_study import (
    Load,
    PhaseOutcome,
    Study,
    attainment,
    begun_elsewhere,
    main,
    outcome_table,
    smallest_pools,
    verdict,
    worker_hours,
)

SIZES = [
    (0.0, "prefill", 1),
    (0.0, "prefill", 2),
    (0.0, "decode", 3),
    (100.0, "prefill", 5),
    (400.0, "prefill", 1),
]


def outcome(attained=0.97, hours=1.2, phase=1):
    return PhaseOutcome(
        "load", phase, 3.0, attained, {"prefill": hours, "decode": 0.0}, {"prefill": 1, "decode": 1}, 0.99,
        {"prefill": 0.5, "decode": 0.5},
    )  # fmt: skip


def text_of(shown):
    console = Console(file=io.StringIO(), width=160)
    console.print(shown)
    return console.file.getvalue()


@pytest.mark.parametrize("begin", [(9, 9), (5, 3), (1, 1)])
def test_the_smallest_pools_are_found_wherever_the_search_begins(begin):
    assert smallest_pools(lambda prefill, decode: prefill >= 5 and decode >= 3, begin) == (5, 3)


def test_a_worker_more_in_one_pool_is_taken_where_it_saves_several_in_the_other():
    """Decode workers compute prompts too, so that few prefill workers may do, with many of them."""
    assert smallest_pools(lambda prefill, decode: 3 * prefill + decode >= 15, (2, 16)) == (5, 1)
    assert smallest_pools(lambda prefill, decode: prefill + 3 * decode >= 15, (12, 1)) == (1, 5)


def test_far_too_few_workers_are_not_tried():
    """Where queues grow without end, a replay takes longest."""
    tried = []

    def keeps(prefill, decode):
        tried.append(decode)
        return decode >= 13

    assert smallest_pools(keeps, (1, 16)) == (1, 13)
    assert min(tried) >= 9


def test_pools_that_never_do_end_the_search():
    with pytest.raises(ConfigError, match=r"more workers do not help\. Loosen the targets"):
        smallest_pools(lambda prefill, decode: False, (2, 2))


def test_hours_are_those_of_the_phase_alone():
    assert worker_hours(SIZES, "prefill", 0.0, 100.0) == pytest.approx(2 * 100 / 3600)
    assert worker_hours(SIZES, "prefill", 50.0, 450.0) == pytest.approx((2 * 50 + 5 * 300 + 1 * 50) / 3600)
    assert worker_hours(SIZES, "decode", 200.0, 300.0) == pytest.approx(3 * 100 / 3600)


def test_nobody_attains_anything_without_requests():
    assert attainment([]) is None


def test_the_verdict_names_the_phases_that_missed():
    assert verdict([outcome(), outcome()]).startswith("Every phase kept 95%. Worker-hours: 1.20 times the oracle's")
    said = verdict([outcome(), outcome(0.9, phase=2)])
    assert "Below 95%: load 2 (90.0 %)." in said


def test_the_table_has_the_hours_of_every_phase_and_of_the_swing():
    text = text_of(outcome_table([outcome(), outcome(hours=1.6, phase=2)]))
    assert "1.200 + 0.000" in text
    assert "1.60" in text
    assert "1.40" in text  # 2.8 hours of 2


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 250 * index, "input_length": 600, "output_length": 8} for index in range(480)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text(
        "simulation: {profile: h100-8b}\nautoscaler: {prefill: {max: 4}, decode: {max: 4}}\n", encoding="utf-8"
    )
    return file


def test_a_tiny_study_runs_from_end_to_end_and_tells_every_part_once_it_is_done(trace, config, monkeypatch):
    monkeypatch.setattr(swing_study, "SETTLE_S", 5.0)
    monkeypatch.setattr(swing_study, "SWINGS", {"load": (Load(1), Load(4))})
    told = []
    first, second = swing_study.run(Study(trace, config, 1.0, 20.0, 2, 0), ["load"], 1, told.append)
    assert (first.phase, second.phase) == (1, 2)
    assert 3 * first.requests_per_s < second.requests_per_s < 5 * first.requests_per_s
    assert first.attainment == second.attainment == 1.0
    assert 0 < first.hours["prefill"] <= 4 * 20 / 3600
    assert told[0] == "load: the autoscaler went through it"
    assert told[1].startswith("load, phase 1: met 100.0 % in 0.0")
    assert told[2].endswith("the oracle has 1 + 1 workers, 0.011 hours")


def test_a_trace_that_is_too_short_is_repeated_with_other_prompts(trace, config, monkeypatch):
    monkeypatch.setattr(swing_study, "SWINGS", {"load": (Load(1), Load(2))})
    arrivals = Study(trace, config, 1.0, 100.0, 2, 0).arrivals("load")  # 300 s of 120
    assert 1195 <= len(arrivals) <= 1200
    assert 199.0 < arrivals[-1].at_s < 200.0
    assert len({arrival.prompt_token_ids for arrival in arrivals}) == len(arrivals)


def test_a_seed_begins_elsewhere_in_the_trace_and_leaves_out_nothing():
    trace = [TraceRequest(float(index), 600 + index, 8, (index,)) for index in range(100)]
    assert begun_elsewhere(trace, 0) == trace
    firsts = set()
    for seed in range(1, 5):
        turned = begun_elsewhere(trace, seed)
        assert [request.at_s for request in turned] == pytest.approx(list(range(100)))
        assert {request.input_tokens for request in turned} == {request.input_tokens for request in trace}
        assert all(later.input_tokens - sooner.input_tokens in (1, -99) for sooner, later in pairwise(turned))
        firsts.add(turned[0].input_tokens)
    assert len(firsts) == 4


def test_a_trace_without_a_rate_is_refused(tmp_path, config):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 5, "input_length": 6, "output_length": 8}\n' * 3, encoding="utf-8")
    with pytest.raises(ConfigError, match="all arrive at once"):
        Study(file, config, 1.0, 60.0, 2, 0).arrivals("load")


def test_the_oracle_must_keep_what_the_autoscaler_must(trace, config, monkeypatch):
    """The whole phase but its first seconds, and nothing of the phase before."""
    monkeypatch.setattr(swing_study, "SETTLE_S", 5.0)
    monkeypatch.setattr(swing_study, "SWINGS", {"load": (Load(1), Load(2))})
    seen = []

    class Nothing:
        requests = ()

    def replayed(self, arrivals, overrides, settings):
        seen.append((arrivals[0].at_s, arrivals[-1].at_s, len(arrivals), settings))
        return Nothing()

    monkeypatch.setattr(Study, "_replay", replayed)
    monkeypatch.setattr(swing_study, "attainment", lambda requests: 1.0)
    study = Study(trace, config, 1.0, 60.0, 2, 0)
    assert study.oracle(("load", 1, (1, 1))) == ((1, 1), 1.0)
    ((first_s, last_s, number, settings),) = seen
    assert 0 <= first_s < 0.2
    assert 59.8 < last_s < 60.0
    assert number == pytest.approx(480, abs=2)
    assert settings.warmup_s == 5.0
    counted = number * 55 / 60
    assert settings.most_missed == pytest.approx(0.05 * counted, abs=2)


def test_the_command_writes_what_it_shows(trace, config, tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(swing_study, "run", lambda *given: asked.append(given) or [outcome()])
    out = tmp_path / "out.json"
    main(f"--trace {trace} -c {config} --swings load --set decode.max_num_seqs=8 --json {out}".split())
    ((study, swings, *_),) = asked
    assert (study.overrides, swings) == ({"decode.max_num_seqs": 8}, ["load"])
    assert "Every phase kept 95%" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["attainment"] == 0.97


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--swings", "lod"], "Did you mean load?"),
        (["--phase", "60"], "--phase must be more than 60 s"),
        (["--set", "decode.wrkers=2"], "Did you mean decode.workers?"),
        (["--scale", "0"], "--scale must be above 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(trace, options, said, capsys, monkeypatch):
    monkeypatch.setattr(swing_study, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        main(["--trace", str(trace), *options])
    assert said in capsys.readouterr().err

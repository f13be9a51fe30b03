"""What is reported and advised about a decode worker's drafts."""

from __future__ import annotations

import json

import pytest

from baton.rpc.wire import worker_pb2
from cluster.telemetry.speculation_report import speculation_advice, speculation_report


def stats_of(
    *methods: worker_pb2.MethodStats, draft_share: float = 0.07, num_running: int = 1
) -> worker_pb2.WorkerStats:
    state = worker_pb2.SpeculationState(default_method="auto", draft_share=draft_share, tokens_per_sequence=1.5)
    return worker_pb2.WorkerStats(methods=methods, speculation=state, num_running=num_running)


def method(
    name: str = "eagle3", alpha: float = 0.7, cost: float = 0.15, num_drafts: int = 100, deeper: float = 1.0
) -> worker_pb2.MethodStats:
    return worker_pb2.MethodStats(
        method=name,
        num_drafts=num_drafts,
        reached=[100, 60, 3],
        accepted=[70, 40, 3],
        recent_acceptance=[alpha, alpha * deeper, 1.0][: 2 if deeper == 1 else 3],
        recent_length=3.0,
        chosen_lengths=[0, 5, 9],
        kinds=[
            worker_pb2.DraftKind(temperature_class=2, workload="grammar", num_drafts=3, reached=9, accepted=6),
            worker_pb2.DraftKind(workload="made up", num_drafts=1, reached=0),
        ],
        costs=[
            worker_pb2.DraftCost(size_class=1, drafting=cost * 2 / 3, verifying=cost / 3),
            worker_pb2.DraftCost(size_class=5, drafting=2.0),
        ],
    )


def test_a_worker_without_speculation_has_no_report():
    assert speculation_report(worker_pb2.WorkerStats()) is None
    assert speculation_advice("prefill-1", worker_pb2.WorkerStats()) == []


def test_the_report_has_the_figures_of_each_method():
    report = speculation_report(stats_of(method(), method("grammar", cost=1e5)))  # what grammars force is no choice
    assert report is not None
    [figures] = json.loads(json.dumps(report))["methods"]
    assert (figures["method"], figures["mode"], figures["alpha"], figures["length"]) == ("eagle3", "used", 0.7, 3.0)
    assert (figures["batch"], figures["cost"]) == ("1", pytest.approx(0.15))
    assert figures["costs"] == {"1": pytest.approx(0.15), "16-31": 2.0}


def test_the_cost_is_that_of_the_current_batch():
    report = speculation_report(stats_of(method(), num_running=40))
    assert report is not None
    assert report["methods"][0]["cost"] == 2.0


def test_advice_has_the_best_lengths():
    [advice] = speculation_advice("decode-1", stats_of(method()))
    assert (advice["worker"], advice["best_by_formula"], advice["best_measured"]) == ("decode-1", 3, 3)
    assert advice["speedup_by_formula"] == pytest.approx(1.747, abs=0.001)
    assert "the formula's best is k = 3" in advice["advice"]
    assert advice["warnings"] == []


def test_a_large_draft_is_warned_of():
    [advice] = speculation_advice("decode-1", stats_of(method(), draft_share=0.25))
    assert "25% of the model's parameters, more than a tenth" in advice["warnings"][0]
    assert not speculation_advice("decode-1", stats_of(method("ngram"), draft_share=0.25))[0]["warnings"]


def test_a_draft_that_never_pays_is_warned_of():
    [advice] = speculation_advice("decode-1", stats_of(method(alpha=0.1, cost=0.4)))
    assert (advice["best_by_formula"], advice["best_measured"]) == (0, 0)
    assert "eagle3 does not pay off" in advice["warnings"][0]
    assert "do not speculate" in advice["advice"]


def test_the_measured_curve_stands_beside_the_formula():
    [advice] = speculation_advice("decode-1", stats_of(method(deeper=0.5)))
    formula, measured = (advice["curves"][name] for name in ("by_formula", "measured"))
    assert measured["acceptance"] == [0.7, 0.35]  # the third position was reached three times
    assert len(formula["speedups"]) == len(measured["speedups"]) == 16
    assert (formula["best"], measured["best"]) == (advice["best_by_formula"], advice["best_measured"])
    decay, verification = advice["formula_errors"]
    assert decay.startswith("Acceptance falls with depth: 0.70 at position 1, 0.35 at position 2. The formula takes")
    assert verification.startswith("Verification is not free: in batches of 1 it is 33% of c = 0.150.")


def test_even_acceptance_has_no_fault_of_depth():
    [advice] = speculation_advice("decode-1", stats_of(method()))
    assert [text for text in advice["formula_errors"] if "depth" in text] == []


def test_figures_by_kind_batch_and_choice_come_along():
    [advice] = json.loads(json.dumps(speculation_advice("decode-1", stats_of(method()))))
    assert advice["kinds"] == [
        {"temperature": "0-0.25", "workload": "other", "num_drafts": 1, "alpha": None},
        {"temperature": "0.75-1.25", "workload": "grammar", "num_drafts": 3, "alpha": 0.6667},
    ]
    assert [(each["batch"], each["cost"]) for each in advice["batches"]] == [("1", 0.15), ("16-31", 2.0)]
    assert (advice["chosen"], advice["tokens_per_sequence"]) == ([0, 5, 9], 1.5)


def test_few_drafts_give_no_advice():
    [advice] = speculation_advice("decode-1", stats_of(method(num_drafts=49)))
    assert (advice["best_by_formula"], advice["best_measured"]) == (None, None)
    assert "Drafts so far: 49;" in advice["advice"]

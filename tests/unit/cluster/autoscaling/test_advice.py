"""Advice on workloads whose best answer is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from baton.core.roles import DECODE, PREFILL
from baton.core.slo import INTERACTIVE, STANDARD
from cluster.autoscaling.advice import advise
from cluster.autoscaling.advice_texts import advice_texts
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.disaggregation import Source, Verdict
from tests.unit.cluster.autoscaling.scenarios import COSTS, FormulaCosts, decide, demand, observe


def ask(asked, prefill=4, decode=4, costs=COSTS, decode_costs=None):
    return advise(asked, {PREFILL: costs, DECODE: decode_costs or costs}, {PREFILL: prefill, DECODE: decode})


def told(*arguments, **options) -> str:
    return "\n".join(advice_texts(ask(*arguments, **options)))


def test_without_enough_traffic_the_advice_says_so():
    assert "not enough traffic yet" in told(demand(5, seen=20))
    assert "no requests have arrived recently" in told(demand(0))


def test_without_measured_costs_the_advice_says_so():
    unmeasured = FormulaCosts(is_measured=False)
    assert "enough steps of decode workers" in told(demand(5), decode_costs=unmeasured)


def test_long_prompts_favour_prefill_and_long_answers_favour_decode():
    prompts, answers = ask(demand(5, prompt=3000, output=20)), ask(demand(5, prompt=100, output=1000))
    assert prompts.best.prefill > 4 > answers.best.prefill
    for advice in (prompts, answers):
        assert advice.best.prefill + advice.best.decode == 8
        assert advice.best.capacity > advice.now.capacity


def test_an_optimal_split_is_kept():
    better = ask(demand(5, prompt=3000, output=20)).best
    again = ask(demand(5, prompt=3000, output=20).with_local_share(better.local_share), better.prefill, better.decode)
    assert again.best == again.now
    assert "Ratio: keep" in advice_texts(again)[0]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 1.0])
def test_what_the_plan_keeps_is_within_the_capacity_of_the_present_pools(share: float) -> None:
    """At a low load, idle decode workers compute nearly all prompts, and at a high load few."""
    asked = demand(4, prompt=1500, output=50).with_local_share(share)
    capacity = ask(asked, 1, 1).now.capacity
    for factor, keeps in ((0.95, True), (1.1, False)):
        decided = decide(observe(0.0, asked.scaled(factor * capacity / asked.rate)))
        assert all(pool.predicted.keeps for pool in decided.pools.values()) == keeps


@pytest.mark.parametrize(
    ("asked", "costs", "limit"),
    [
        (demand(5, prompt=3000, output=20), COSTS, "the TTFT of prompts on prefill workers"),
        (demand(5, prompt=100, output=1000), COSTS, "the TPOT on decode workers"),
        (demand(5, prompt=100, output=1000), FormulaCosts(max_num_seqs=8), "decode.max_num_seqs"),
        (demand(5, prompt=100, output=1000), FormulaCosts(kv_tokens=9000), "the KV cache"),
    ],
)
def test_the_first_limit_of_the_present_pools_is_named(asked: Demand, costs: FormulaCosts, limit: str) -> None:
    assert f"requests/s; the first limit is {limit}." in told(asked, costs=costs)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "would serve more; now they compute none"),
        (0.01, "would serve more; now they compute none"),
        (0.5, "keep 50 %"),
        (
            0.9,
            "at the most load, 50 % of the uncached prompt tokens belong on decode workers; at the present load the ",
        ),
    ],
)
def test_the_advice_on_local_prompts_tells_the_present_share_from_that_at_the_most_load(
    share: float, text: str
) -> None:
    assert text in told(demand(4, prompt=1500, output=50).with_local_share(share), 1, 1)


def test_both_pools_sustain_the_advised_capacity():
    from cluster.autoscaling.decode_capacity import decode_forecast
    from cluster.autoscaling.prefill_capacity import prefill_forecast

    asked = demand(5, prompt=1500, output=300)
    best = ask(asked).best
    for factor, keeps in ((0.98, True), (1.02, False)):
        scaled = asked.scaled(factor * best.capacity / asked.rate).with_local_share(best.local_share)
        found = prefill_forecast(scaled.split()[0], COSTS, best.prefill).keeps
        assert (found and decode_forecast(scaled, COSTS, best.decode).keeps) == keeps


def test_the_order_of_classes_does_not_matter():
    short, long = (
        demand(rate, prompt, output, slo).classes[0]
        for rate, prompt, output, slo in ((20, 100, 50, STANDARD), (2, 3000, 50, replace(STANDARD, name="other")))
    )
    first, second = (ask(Demand(classes, 1000)) for classes in ((short, long), (long, short)))
    assert first.aggregated.capacity == pytest.approx(second.aggregated.capacity)
    assert first.best == second.best


def test_prompts_avoid_decode_steps_at_little_cost():
    """Half of the prompts on four decode workers would carry 2 % more."""
    assert ask(demand(5, prompt=3000, output=20)).best.local_share == 0


def test_the_advice_says_when_disaggregation_hurts():
    """Two workers, of which one would have next to nothing to do."""
    text = told(demand(1, prompt=20, output=800), prefill=1, decode=1)
    assert "Disaggregation hurts this workload: 2 aggregated workers" in text


@pytest.mark.parametrize(
    ("rate", "verdict", "words"),
    [(200, Verdict.NOT_AT_THIS_LOAD, "not needed at this load"), (240, Verdict.WORTH_IT, "Disaggregation pays off")],
)
def test_the_advice_says_when_disaggregation_pays(rate, verdict, words):
    """Decoding within 20 ms a token does not bear many prompts in between."""
    asked = demand(rate, slo=replace(INTERACTIVE, tpot_s=0.02))
    answer = ask(asked, prefill=28, decode=36)
    assert answer.disaggregation.verdict == verdict
    assert words in "\n".join(advice_texts(answer))
    pools, aggregated = answer.best.capacity, answer.aggregated.capacity
    assert (aggregated >= asked.rate) == (verdict == Verdict.NOT_AT_THIS_LOAD)
    assert pools > asked.rate


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (FormulaCosts(), "almost no tokens come from drafts"),
        (FormulaCosts(rounds=2.0, per_sequence=0.2), "2.00 tokens per round; a token takes"),
        (FormulaCosts(rounds=1.2, per_sequence=4.0), "cost more than they save"),
    ],
)
def test_speculation_is_judged_at_the_current_batch(costs, words):
    class Dear(FormulaCosts):
        """Drafts that cost more than the steps they save."""

        def tpot_ms(self, batch, context_tokens):
            return super().tpot_ms(batch, context_tokens) * (1.5 if self.rounds == 1.2 else 1.0)

    dear = Dear(rounds=costs.rounds, per_sequence=costs.per_sequence)
    text = told(demand(2), costs=dear)
    assert words in text
    assert ("it pays" in text) == (costs.rounds == 2.0)


def test_the_advice_on_drafts_names_the_load_it_is_for():
    """At 2 requests/s of 200 tokens and 10 ms a token or so, few sequences decode at once; the targets allow many."""
    present, most = (line for line in told(demand(2)).splitlines() if line.startswith("Speculation "))
    assert present.startswith("Speculation at the present load (")
    assert most.startswith("Speculation at the highest load that meets the targets (")
    figures = ask(demand(2)).drafts
    assert [one.is_present for one in figures] == [True, False]
    assert f"({figures[1].batch} sequences per step of a worker)" in most
    assert figures[0].batch < figures[1].batch


def test_figures_stand_behind_the_verdict():
    """On the fictitious accelerator a prompt of 1000 tokens takes 8 + 100 + 0.5 ms, its hand-off 2 + 1 ms."""
    asked = demand(20, prompt=1000, output=200)
    figures = {one.name: one for one in ask(asked).disaggregation.figures}
    assert (figures["Arrivals in the last minute or less"].value, figures["Answer"].value) == (20, 200)
    assert figures["Prefill of a prompt"].value == pytest.approx(108.5)
    assert figures["Hand-off of its KV"].value == pytest.approx(3.0)
    apart, beside, undisturbed = (
        figures[f"TPOT, {which}"].value
        for which in ("two pools as now", "doing both", "the same without prompts in between")
    )
    assert 8.0 < undisturbed < apart < beside
    assert 0.0 < figures["Share of the work that is prefill"].value < 1.0
    assert {one.source for one in figures.values()} == set(Source)


def test_workers_that_cannot_keep_up_have_no_tpot():
    figures = {one.name: one.value for one in ask(demand(2000), 1, 1).disaggregation.figures}
    assert figures["TPOT, two pools as now"] is None


def test_without_enough_traffic_the_verdict_counts_what_is_missing():
    answer = ask(demand(5, seen=20)).disaggregation
    assert answer.verdict == Verdict.UNKNOWN
    assert "20 of 50 requests" in answer.text
    assert [one.value for one in answer.figures] == [20]


def test_the_advice_serializes():
    advice = ask(demand(5))
    assert json.loads(json.dumps(advice.to_dict()))["now"]["prefill"] == 4

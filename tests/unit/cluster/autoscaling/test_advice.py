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
from tests.unit.cluster.autoscaling.scenarios import COSTS, FormulaCosts, demand


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


def test_the_advice_says_when_disaggregation_pays():
    """Decoding within 20 ms a token does not bear many prompts in between."""
    text = told(demand(200, slo=replace(INTERACTIVE, tpot_s=0.02)), prefill=34, decode=30)
    assert "Disaggregation pays" in text


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (FormulaCosts(), "almost no tokens come from drafts"),
        (FormulaCosts(rounds=2.0, per_sequence=0.2), "2.00 tokens per round; a token takes"),
        (FormulaCosts(rounds=1.2, per_sequence=4.0), "it costs more than it saves"),
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


def test_the_advice_serializes():
    advice = ask(demand(5))
    assert json.loads(json.dumps(advice.to_dict()))["now"]["prefill"] == 4

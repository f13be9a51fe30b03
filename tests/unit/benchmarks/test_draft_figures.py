"""The speed-up that a worker's figures predict."""

from __future__ import annotations

import pytest

from baton.core.draft_payoff import Acceptance, speedup
from baton.core.workloads import Workload
from benchmarks.draft_figures import predicted_speedup
from decode_worker.speculation.controller import NONE, SpeculationController

KIND = (0, Workload.SHORT_PROMPT)


def test_the_prediction_is_that_of_the_measured_acceptance_and_cost():
    controller = SpeculationController({}, NONE)
    figures = controller.figures.of("suffix")
    for accepted in (2, 1, 0, 2) * 50:
        figures.judged(KIND, 2, accepted, min(2, accepted + 1))
    figures.cost(1, drafting_ms=1.0, verifying_ms=0.5, plain_ms=10.0, num_tokens=2)
    expected = speedup(Acceptance((0.75, 2 / 3)), 0.1, 2)
    assert predicted_speedup(controller, "suffix", 1) == pytest.approx(expected, rel=0.01)
    # In every second round: half of the tokens above one, and half of the cost.
    assert predicted_speedup(controller, "suffix", 1, 0.5) == pytest.approx((1 + expected * 1.2) / 2.2, rel=0.01)


def test_without_drafts_or_costs_there_is_no_prediction():
    controller = SpeculationController({}, NONE)
    assert predicted_speedup(controller, "suffix", 1) is None
    controller.figures.of("suffix").judged(KIND, 1, 1, 1)
    assert predicted_speedup(controller, "suffix", 1) is None

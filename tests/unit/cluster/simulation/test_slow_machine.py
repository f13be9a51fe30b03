"""On a slow machine the default configuration gives late answers rather than refusals."""

from typing import Any

import pytest

from baton.bench.traces import TraceRequest
from cluster.config.config import BatonConfig
from cluster.simulation.profile import StepTimes, TransferCosts
from cluster.simulation.replay import ReplaySettings, replay
from cluster.simulation.workload import make_arrivals
from tests.simulated import make_profile

LAPTOP = make_profile(
    step=StepTimes(
        fixed=30.0,
        per_prompt_token=2.0,
        per_attention_pair=1e-3,
        per_sequence=4.0,
        per_context_token=5e-3,
        per_drafted_token=2.0,
    ),
    transfer=TransferCosts(fixed_ms=5.0, bytes_per_second=5e8),
    kv_tokens=32_768,
    kv_bytes_per_token=50_000,
    noise=0.1,
)
SLO_CLASSES = ["interactive", "standard", "batch"]


def run(trace: list[TraceRequest], slo_class: str, **config: Any) -> dict[str, Any]:
    """Figures of one prefill and one decode worker."""
    arrivals = make_arrivals(trace, shares={slo_class: 1}, max_tokens=2000)
    document = replay(BatonConfig.from_dict(config), LAPTOP, arrivals, ReplaySettings()).document
    figures: dict[str, Any] = document["classes"]["all"]
    return figures


def burst(count: int) -> list[TraceRequest]:
    return [TraceRequest(0.0, 60 + 7 * (index % 30), 16 + index % 64, (index,)) for index in range(count)]


@pytest.mark.parametrize("count", [100, pytest.param(200, marks=pytest.mark.thorough(covered_by="[100]"))])
@pytest.mark.parametrize("slo_class", ["standard", "batch"])
def test_a_burst_is_served_to_the_last_request(slo_class: str, count: int) -> None:
    figures = run(burst(count), slo_class)
    assert figures["finished"] == figures["requests"] == count
    assert figures["ttft_ms"]["p99"] > 20_000, "the machine is not slow, or the burst too small to say anything"


def test_a_short_queue_deadline_refuses_most_of_a_burst() -> None:
    """So the test above is about the default, and not about a machine that is fast enough."""
    slo = {"classes": {"standard": {"queue_deadline": "5s"}}}
    figures = run(burst(100), "standard", slo=slo)
    assert 0 < figures["finished"] < 50


@pytest.mark.parametrize("slo_class", SLO_CLASSES)
def test_an_idle_machine_refuses_and_delays_no_request(slo_class: str) -> None:
    """Long prompts, which take longer than any target allows, one at a time."""
    trace = [TraceRequest(30.0 * index, 500 + 300 * (index % 5), 20, (index,)) for index in range(20)]
    figures = run(trace, slo_class)
    assert figures["finished"] == figures["requests"] == 20
    assert figures["ttft_ms"]["p50"] > 2_000

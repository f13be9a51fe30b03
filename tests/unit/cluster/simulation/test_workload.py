"""Prompts share what the trace says they share."""

import pytest

from baton.bench.traces import TraceRequest
from baton.core.errors import ConfigError
from cluster.simulation.schedule import parse_schedule
from cluster.simulation.workload import MeasuredRequest, PromptTokens, make_arrivals, repeat_arrivals

SHARES = {"standard": 1.0}


def common_prefix(first, second):
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )


def test_equal_hash_ids_give_equal_tokens():
    prompts = PromptTokens(0)
    first = prompts.make(TraceRequest(0.0, 1600, 1, (7, 8, 9, 10)), 0)
    second = prompts.make(TraceRequest(0.0, 1500, 1, (7, 8, 11)), 1)
    assert (len(first), len(second)) == (1600, 1500)
    assert common_prefix(first, second) == 1024


def test_scaled_prompts_share_the_same_fraction_as_recorded_ones():
    trace = [TraceRequest(0.0, 2048, 1, (7, 8, 9, 10)), TraceRequest(0.0, 2048, 1, (7, 8, 11, 12))]
    for scale, shared in ((0.25, 256), (1.0, 1024), (2.0, 2048), (0.1, 102)):
        first, second = make_arrivals(trace, input_scale=scale, shares=SHARES, max_tokens=10_000)
        assert len(first.prompt_token_ids) == round(2048 * scale)
        assert common_prefix(first.prompt_token_ids, second.prompt_token_ids) == shared


def test_prompts_that_differ_at_the_end_still_differ_when_truncated():
    trace = [TraceRequest(0.0, 2048, 100, (7, 8, 9, last)) for last in (10, 11)]
    first, second = make_arrivals(trace, shares=SHARES, max_tokens=1124)
    assert first.is_cut
    assert len(first.prompt_token_ids) == 1024
    assert common_prefix(first.prompt_token_ids, second.prompt_token_ids) == 512


def test_tokens_beyond_the_hash_ids_are_not_shared():
    prompts = PromptTokens(0)
    first, second = (prompts.make(TraceRequest(0.0, 700, 1, (7,)), number) for number in range(2))
    assert common_prefix(first, second) == 512


def test_without_hash_ids_nothing_is_shared():
    prompts = PromptTokens(0)
    made = [prompts.make(TraceRequest(0.0, 5000, 1), number) for number in range(50)]
    assert len({prompt[:16] for prompt in made}) == 50


def test_many_blocks_differ_from_the_start():
    prompts = PromptTokens(0)
    starts = {prompts.make(TraceRequest(0.0, 3, 1, (block,)), 0) for block in range(0, 200_000, 13)}
    assert len(starts) == len(range(0, 200_000, 13))


def test_a_rate_speeds_up_the_clock_and_the_trace_can_repeat():
    trace = [TraceRequest(float(second), 100, 5, (second,)) for second in range(10)]
    arrivals = make_arrivals(trace, rate_scale=2.0, num_requests=25, shares=SHARES, max_tokens=1000)
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0.5 * number for number in range(25)])
    assert arrivals[3].prompt_token_ids != arrivals[13].prompt_token_ids
    assert all(arrival.params.max_tokens == 5 and arrival.params.ignore_eos for arrival in arrivals)


def test_long_requests_are_truncated():
    (arrival,) = make_arrivals([TraceRequest(0.0, 5000, 300)], shares=SHARES, max_tokens=1000)
    assert (len(arrival.prompt_token_ids), arrival.params.max_tokens, arrival.is_cut) == (700, 300, True)


def test_classes_arrive_with_their_shares():
    trace = [TraceRequest(0.0, 10, 1)] * 2000
    arrivals = make_arrivals(trace, shares={"interactive": 1, "batch": 3}, max_tokens=100)
    share = sum(arrival.slo == "interactive" for arrival in arrivals) / 2000
    assert share == pytest.approx(0.25, abs=0.04)


def test_rates_and_lengths_follow_their_schedules():
    trace = [TraceRequest(float(second), 100, 10) for second in range(100)]
    arrivals = make_arrivals(
        trace,
        rate_scale=parse_schedule("--rate-scale", "0=1,20=4"),
        output_scale=parse_schedule("--output-scale", "0=1,30=0.5"),
        shares=SHARES,
        max_tokens=1000,
    )
    assert [arrival.at_s for arrival in arrivals[18:24]] == pytest.approx([18, 19, 20, 20.25, 20.5, 20.75])
    assert {arrival.params.max_tokens for arrival in arrivals if arrival.at_s < 30} == {10}
    assert {arrival.params.max_tokens for arrival in arrivals if arrival.at_s >= 30} == {5}


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "x", "5=1", "0=1,0=2", "0=1,9", "0=1,5=0", "nan", "inf", "0=1,inf=2", "0=1,nan=2", "0=1,5=nan"],
)
def test_an_impossible_schedule_is_refused(text):
    with pytest.raises(ConfigError, match="--rate-scale"):
        parse_schedule("--rate-scale", text)


@pytest.mark.parametrize("options", [{"shares": {"standard": 0.0}}, {"shares": {}}])
def test_impossible_workloads_are_refused(options):
    with pytest.raises(ConfigError):
        make_arrivals([TraceRequest(0.0, 10, 1)], **{"shares": SHARES, "max_tokens": 100, **options})


def test_a_real_run_is_repeated_with_its_cache_hits():
    measured = [MeasuredRequest(0.0, 500, 9, 0, is_warmup=True), MeasuredRequest(1.5, 400, 7, 256, is_warmup=False),
                MeasuredRequest(2.0, 300, 5, 128, is_warmup=False)]  # fmt: skip
    first, second, third = repeat_arrivals(measured, "standard")
    assert [arrival.at_s for arrival in (first, second, third)] == [0.0, 1.5, 2.0]
    assert common_prefix(second.prompt_token_ids, third.prompt_token_ids) == 128
    assert common_prefix(first.prompt_token_ids, second.prompt_token_ids) == 0
    assert second.params.max_tokens == 7


def test_only_the_cached_part_of_a_real_run_is_shared():
    measured = [MeasuredRequest(float(index), 400, 7, 256, is_warmup=False) for index in range(40)]
    prompts = [arrival.prompt_token_ids for arrival in repeat_arrivals(measured, "standard")]
    assert len({prompt[:256] for prompt in prompts}) == 1
    assert len({prompt[256:272] for prompt in prompts}) == 40

"""Closed and open loops against servers with a known schedule: send times and the figures derived from them."""

import asyncio
import itertools
from math import inf, nan

import pytest

from baton.bench.endpoint import RequestSpec
from baton.bench.runner import StageRun, run_stage
from baton.bench.sample import UNFINISHED, UNSENT, parse_slo
from baton.bench.stage_result import evaluate
from baton.bench.stages import Bounds, LoadSettings, Stage, plan_stages
from baton.core.errors import ConfigError
from tests.reference_server import Schedule
from tests.serving_reference import run_against

SPEC = RequestSpec("one two three", 3, 2)
STALL_S = 2.0


class RecordingSender:
    """Answers after ``answer_s``, or never, and counts how many requests it has at once."""

    def __init__(self, answer_s: float = 0.0) -> None:
        self.answer_s = answer_s
        self.in_flight = 0
        self.most_in_flight = 0
        self.num_sent = 0

    async def send(self, spec, sample, epoch_s):
        self.num_sent += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        sample.sent_s = sample.intended_s
        sample.error = UNFINISHED
        try:
            await asyncio.sleep(self.answer_s)
        finally:
            self.in_flight -= 1
        sample.error = None
        sample.finished_s = sample.intended_s + self.answer_s
        sample.chunk_times_s.append(sample.finished_s)
        sample.output_tokens = 1


async def run_with(sender, stage, stop=None) -> StageRun:
    run = StageRun(stage)
    await run_stage(run, itertools.repeat(SPEC), sender, stop or asyncio.Event(), seed=0)
    return run


class TestStall:
    """The server says nothing for two seconds, once."""

    @staticmethod
    async def measure(stage: Stage):
        run, _ = await run_against(Schedule(0.002, 0.002, stall_at_s=0.5, stall_s=STALL_S), stage, SPEC)
        return evaluate(run, parse_slo("--slo", "ttft=1s"))

    async def test_an_open_loop_shows_a_stall(self):
        """Some 50 of 200 requests are due during the stall; a tenth of them waits for 1.8 s and more."""
        result = await self.measure(Stage(0, Bounds(requests=200, seconds=30), "constant", rate=50.0))
        assert result.num_failed == 0
        assert result.latencies["ttft_ms"].p99 >= 1500
        assert result.latencies["ttft_ms"].max <= 1000 * STALL_S + 1500
        assert result.attainment is not None
        assert result.attainment <= 0.8

    async def test_a_limit_on_requests_in_flight_does_not_hide_a_stall(self):
        """Two requests see the stall from when they are sent; those that wait for a place, from when they are due."""
        stage = Stage(0, Bounds(requests=400, seconds=30), "constant", rate=100.0, max_inflight=2)
        result = await self.measure(stage)
        assert result.latencies["ttft_ms"].p99 >= 1500
        assert result.latencies_from_send["ttft_ms"].p99 < 1000
        assert result.latencies_from_send["e2e_ms"].max >= 1500

    async def test_a_closed_loop_hides_a_stall(self):
        """One client sends one request into the stall and waits with all others until the stall ends."""
        result = await self.measure(Stage(0, Bounds(requests=400, seconds=30), concurrency=1))
        # The stall comes before the first token of that request or before its second: E2E has both.
        assert result.latencies["e2e_ms"].max >= 1000 * STALL_S - 500
        assert result.latencies["e2e_ms"].p99 < 1000


class TestClosedLoop:
    async def test_concurrency_is_kept_and_never_exceeded(self):
        sender = RecordingSender(0.002)
        run = await run_with(sender, Stage(0, Bounds(requests=40), concurrency=4))
        assert sender.most_in_flight == 4
        assert len(run.samples) >= 40

    async def test_warm_up_requests_are_additional_and_not_measured(self):
        run = await run_with(RecordingSender(), Stage(0, Bounds(requests=10, warmup_requests=5), concurrency=1))
        assert [sample.is_warmup for sample in run.samples] == [True] * 5 + [False] * 10
        assert evaluate(run).num_measured == 10

    async def test_the_clock_starts_after_the_warm_up(self):
        """The one request of the warm-up takes longer than the stage; the others are measured all the same."""
        bounds = Bounds(seconds=0.05, warmup_requests=1, grace_s=30)
        run = await run_with(RecordingSender(0.2), Stage(0, bounds, concurrency=1))
        assert [sample.is_warmup for sample in run.samples] == [True, False]
        assert evaluate(run).num_measured == 1

    async def test_an_endless_warm_up_is_abandoned(self):
        bounds = Bounds(seconds=0.01, warmup_requests=1, grace_s=0.01)
        result = evaluate(await run_with(RecordingSender(3600), Stage(0, bounds, concurrency=1)))
        assert result.num_measured == 0
        assert "--duration" in " ".join(result.notes)

    async def test_the_time_limit_ends_the_stage_after_late_answers(self):
        run = await run_with(RecordingSender(1.0), Stage(0, Bounds(seconds=0.5, grace_s=30), concurrency=2))
        assert [sample.error for sample in run.samples] == [None, None]

    async def test_missing_answers_count_as_failed(self):
        run = await run_with(RecordingSender(3600), Stage(0, Bounds(seconds=0.01, grace_s=0.01), concurrency=2))
        result = evaluate(run, parse_slo("--slo", "ttft=1h"))
        assert result.failures == {UNFINISHED: 2}
        assert result.attainment == 0.0
        assert result.latencies["ttft_ms"].count == 0


class TestOpenLoop:
    async def test_slow_answers_do_not_slow_down_the_load(self):
        """Fifty requests are sent although no answer comes."""
        sender = RecordingSender(3600)
        stage = Stage(0, Bounds(requests=50, grace_s=0.01), "constant", rate=500.0)
        run = await run_with(sender, stage)
        assert sender.num_sent == sender.most_in_flight == 50
        assert evaluate(run).num_failed == 50

    async def test_send_times_follow_the_schedule(self):
        stage = Stage(0, Bounds(requests=20), "poisson", rate=400.0)
        fast, slow = await run_with(RecordingSender(), stage), await run_with(RecordingSender(0.05), stage)
        assert [sample.intended_s for sample in fast.samples] == [sample.intended_s for sample in slow.samples]

    async def test_requests_waiting_for_a_slot_are_counted(self):
        sender = RecordingSender(3600)
        stage = Stage(0, Bounds(requests=10, grace_s=0.01), "constant", rate=500.0, max_inflight=3)
        result = evaluate(await run_with(sender, stage))
        assert sender.num_sent == 3
        assert result.failures == {UNSENT: 7, UNFINISHED: 3}

    async def test_the_time_limit_cuts_the_schedule(self):
        run = await run_with(RecordingSender(), Stage(0, Bounds(requests=1000, seconds=0.1), "constant", rate=100.0))
        assert 8 <= len(run.samples) <= 10

    async def test_the_clock_starts_after_the_last_warm_up_request(self):
        """At 100 requests/s the warm-up alone takes longer than the 45 ms that are measured."""
        stage = Stage(0, Bounds(requests=50, seconds=0.045, warmup_requests=10), "constant", rate=100.0)
        run = await run_with(RecordingSender(), stage)
        assert [sample.is_warmup for sample in run.samples] == [True] * 10 + [False] * 4

    async def test_a_warm_up_in_seconds_is_additional(self):
        stage = Stage(0, Bounds(requests=50, seconds=0.04, warmup_s=0.105), "constant", rate=100.0)
        run = await run_with(RecordingSender(), stage)
        assert [sample.is_warmup for sample in run.samples] == [True] * 10 + [False] * 4


async def test_an_interrupted_stage_keeps_its_results():
    stop, sender = asyncio.Event(), RecordingSender(0.001)
    asyncio.get_running_loop().call_later(0.1, stop.set)
    run = await run_with(sender, Stage(0, Bounds(requests=10**6, seconds=600), concurrency=3), stop)
    result = evaluate(run)
    assert run.is_interrupted
    assert result.num_measured > 0
    assert result.num_failed == 0  # the server is not to blame for what was given up
    assert "interrupted" in result.notes[0]


async def test_failures_are_counted_by_kind_and_not_as_goodput():
    schedule = Schedule(0.0, 0.0, fail_every=4)
    run, _ = await run_against(schedule, Stage(0, Bounds(requests=40), concurrency=1), SPEC)
    result = evaluate(run, parse_slo("--slo", "ttft=1h,tpot=1h,e2e=1h"))
    assert result.failures == {"http_503": 10}
    assert "on purpose" in result.failure_messages["http_503"]
    assert result.attainment == 0.75
    assert result.latencies["ttft_ms"].count == 30


class TestPlan:
    def plan(self, trace_length=None, **options):
        return plan_stages(LoadSettings(**options), trace_length)

    def test_every_number_gets_a_stage(self):
        assert [stage.label for stage in self.plan(concurrency=(1, 4))] == ["1 at once", "4 at once"]
        assert [stage.label for stage in self.plan(rate=(0.5, 2.0))] == ["0.5/s poisson", "2/s poisson"]
        assert [stage.label for stage in self.plan(trace_length=9, arrival="trace", speed_up=5)] == ["trace x 5"]
        assert [stage.label for stage in self.plan()] == ["1 at once"]

    def test_every_stage_is_bounded_in_count_and_time(self):
        (stage,) = self.plan()
        assert (stage.bounds.requests, stage.bounds.seconds) == (1000, 60.0)
        (stage,) = self.plan(trace_length=77, arrival="trace")
        assert (stage.bounds.requests, stage.bounds.seconds) == (77, 3600.0)

    def test_each_client_of_a_closed_loop_warms_up(self):
        assert [stage.bounds.warmup_requests for stage in self.plan(concurrency=(1, 8))] == [1, 8]
        assert self.plan(rate=(1.0,))[0].bounds.warmup_requests == 0

    @pytest.mark.parametrize(
        ("options", "fragment"),
        [
            ({"concurrency": (1,), "rate": (1.0,)}, "Give only one kind"),
            ({"concurrency": (0,)}, "at least 1"),
            ({"concurrency": (2, 50), "requests": 3}, "--concurrency 50 is more than the 3 requests of a stage"),
            ({"arrival": "trace", "trace_length": 4, "requests": 10}, "ask for 10, but the trace has 4 requests"),
            ({"rate": (-1.0,)}, "above 0"),
            ({"arrival": "poisson"}, "needs --rate"),
            ({"arrival": "trace"}, "--trace"),
            ({"arrival": "poison", "rate": (1.0,)}, "Did you mean poisson"),
            ({"rate": (1.0,), "max_inflight": 0}, "--max-inflight"),
            ({"rate": (2.0, nan)}, "--rate must be a number above 0 and at most 1e+06; got nan"),
            ({"rate": (inf,)}, "--rate must be a number above 0 and at most 1e+06; got inf"),
            ({"rate": (1.0,), "burstiness": nan}, "--burstiness must be a number above 0; got nan"),
            ({"arrival": "trace", "trace_length": 1, "speed_up": inf}, "--speed-up must be a number above 0; got inf"),
            ({"requests": 0}, "--requests must be at least 1; got 0."),
            ({"duration_s": 0}, "--duration must be a number above 0; got 0."),
            ({"duration_s": nan}, "--duration must be a number above 0; got nan."),
            ({"warmup_requests": -1}, "--warmup-requests must be at least 0; got -1."),
            ({"warmup_s": -1}, "--warmup must be a number of at least 0; got -1."),
            ({"warmup_s": nan}, "--warmup must be a number of at least 0; got nan."),
            ({"grace_s": inf}, "--grace must be a number of at least 0; got inf."),
        ],
    )
    def test_an_impossible_load_is_refused(self, options, fragment):
        with pytest.raises(ConfigError) as caught:
            self.plan(**options)
        assert fragment in caught.value.message

"""The judgement of a worker's progress, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.core.steps import StepProgress
from cluster.registry.liveness_config import LivenessConfig
from cluster.registry.progress_judge import STEP_FACTOR, ProgressJudge, Standing

CONFIG = LivenessConfig(suspect_after=3.0, replace_after=10.0, idle_check=10.0)
PERIOD_S = 0.5


class Watched:
    """A worker that is pinged every half second, and its judge."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.judge = ProgressJudge(CONFIG, self.now_s)
        self.num_steps = 7

    def tick(self, progress: StepProgress | None) -> Standing:
        """One ping, with its answer, or ``None`` without one."""
        self.judge.judge(self.now_s)
        self.judge.asked(self.now_s)
        if progress is not None:
            self.judge.answered(progress, self.now_s)
        standing = self.judge.judge(self.now_s)
        self.now_s += PERIOD_S
        return standing

    def serve(self, seconds: float) -> None:
        """Answers, and makes steps."""
        for _ in range(round(seconds / PERIOD_S)):
            self.num_steps += 5
            assert self.tick(StepProgress(self.num_steps, 0.02, 0.05)) is Standing.TRUSTED

    def until(self, standing: Standing, progress: StepProgress | None = None) -> float:
        """Seconds with this answer until there is the standing."""
        begun_s = self.now_s
        while self.tick(progress) is not standing:
            assert self.now_s < begun_s + 1000, "it never comes to that"
        return self.now_s - PERIOD_S - begun_s

    def stuck(self, expected_s: float, standing: Standing) -> float:
        """Seconds for which a step runs until there is the standing."""
        begun_s = self.now_s
        while self.tick(StepProgress(self.num_steps, self.now_s - begun_s + 0.01, expected_s)) is not standing:
            assert self.now_s < begun_s + 1000, "it never comes to that"
        return self.now_s - PERIOD_S - begun_s


def test_a_silent_worker_is_suspected_and_then_lost():
    watched = Watched()
    watched.serve(5)
    assert watched.until(Standing.SUSPECTED) == 3.0
    assert watched.judge.reason == "it has not answered for 3.0 s"
    assert watched.until(Standing.LOST) == 10.0 - PERIOD_S


def test_a_silence_counts_from_the_first_question_without_an_answer():
    watched = Watched()
    watched.serve(1)
    watched.now_s += 60  # the caller had no time to ask
    assert watched.until(Standing.SUSPECTED) == 3.0


def test_a_refused_connection_is_suspicious_at_once():
    watched = Watched()
    watched.judge.refused("connection refused")
    assert watched.judge.judge(watched.now_s) is Standing.SUSPECTED
    assert watched.judge.reason == "connection refused"


def test_a_step_may_take_ten_times_as_long_as_expected():
    watched = Watched()
    watched.serve(5)
    assert watched.stuck(0.05, Standing.SUSPECTED) == 3.0
    assert "a step has run for 3.0 s; expected are 0.05 s" in watched.judge.reason
    watched = Watched()
    watched.serve(5)
    assert watched.stuck(4.0, Standing.SUSPECTED) == STEP_FACTOR * 4.0


def test_a_step_of_unknown_length_gets_the_shortest_limit():
    assert Watched().stuck(0.0, Standing.SUSPECTED) == 3.0


def test_a_step_that_was_stopped_with_the_whole_machine_is_no_reason():
    watched = Watched()
    watched.serve(2)
    assert watched.tick(StepProgress(watched.num_steps, 3600.0, 0.05)) is Standing.TRUSTED
    watched.serve(2)


def test_a_worker_that_answers_again_must_make_a_step():
    watched = Watched()
    watched.serve(1)
    watched.until(Standing.SUSPECTED)
    idle = StepProgress(watched.num_steps)
    assert watched.tick(idle) is Standing.SUSPECTED
    assert watched.judge.wants_probe(watched.now_s)
    assert watched.tick(StepProgress(watched.num_steps + 1)) is Standing.TRUSTED
    assert watched.judge.reason == ""


def test_a_successful_probe_is_a_proof_too():
    watched = Watched()
    watched.until(Standing.SUSPECTED)
    watched.tick(StepProgress(0))
    watched.judge.probing(watched.now_s)
    assert not watched.judge.wants_probe(watched.now_s)
    watched.judge.proved(watched.now_s)
    assert watched.tick(StepProgress(0)) is Standing.TRUSTED


def test_a_lost_worker_that_returns_is_trusted_again():
    watched = Watched()
    watched.until(Standing.LOST)
    assert watched.tick(StepProgress(1)) is Standing.TRUSTED


def test_an_idle_worker_is_probed():
    watched = Watched()
    watched.serve(1)
    last_step_s = watched.now_s - PERIOD_S
    idle = StepProgress(watched.num_steps)
    while not watched.judge.wants_probe(watched.now_s):
        watched.tick(idle)
        assert watched.now_s < 200
    assert watched.now_s - last_step_s == 10.0
    watched.judge.probing(watched.now_s)
    watched.judge.proved(watched.now_s)
    assert not watched.judge.wants_probe(watched.now_s)
    watched.judge.probing(watched.now_s)
    assert watched.until(Standing.SUSPECTED, idle) == 3.0
    assert "it is idle, but has not begun" in watched.judge.reason


def test_a_probe_whose_step_is_slow_is_judged_by_the_step():
    watched = Watched()
    watched.judge.probing(watched.now_s)
    assert watched.stuck(1.0, Standing.SUSPECTED) == 10.0


def test_a_probe_that_fails_is_suspicious_until_one_succeeds():
    watched = Watched()
    idle = StepProgress(0)
    watched.judge.probing(watched.now_s)
    watched.judge.probe_failed("it cannot compute a token: the device is broken")
    assert watched.tick(idle) is Standing.SUSPECTED
    assert watched.tick(StepProgress(1)) is Standing.SUSPECTED  # a failed step is a step
    watched.judge.proved(watched.now_s)
    assert watched.tick(idle) is Standing.TRUSTED


def test_a_probe_without_an_answer_says_nothing_by_itself():
    watched = Watched()
    watched.judge.probing(watched.now_s)
    watched.judge.probe_failed()
    assert watched.tick(StepProgress(0)) is Standing.TRUSTED


@given(st.lists(st.tuples(st.floats(0.01, 2.9), st.integers(1, 5), st.floats(0, 0.5)), max_size=60))
def test_a_worker_that_answers_within_the_limit_and_makes_steps_is_always_trusted(answers):
    now_s, num_steps = 0.0, 0
    judge = ProgressJudge(CONFIG, now_s)
    for delay_s, new_steps, age_s in answers:
        judge.asked(now_s)
        now_s += delay_s
        assert judge.judge(now_s) is Standing.TRUSTED
        num_steps += new_steps
        judge.answered(StepProgress(num_steps, age_s, 0.01), now_s)
        assert judge.judge(now_s) is Standing.TRUSTED


@given(st.lists(st.sampled_from(["answer", "step", "silence", "stuck", "refusal", "proof"]), max_size=80))
def test_only_suspects_have_reasons_and_loss_follows_suspicion(events):
    watched = Watched()
    before = Standing.TRUSTED
    suspected_s = 0.0
    for event in events:
        if event == "refusal":
            watched.judge.refused("no")
        if event == "proof":
            watched.judge.proved(watched.now_s)
        watched.num_steps += event == "step"
        answer = StepProgress(watched.num_steps, 50.0 if event == "stuck" else 0.0, 0.01)
        standing = watched.tick(None if event in ("silence", "refusal") else answer)
        now_s = watched.now_s - PERIOD_S
        if before is Standing.TRUSTED and standing is not before:
            assert standing is Standing.SUSPECTED
            suspected_s = now_s
        if standing is Standing.LOST:
            assert now_s - suspected_s >= CONFIG.replace_after
        assert (watched.judge.reason != "") == (standing is not Standing.TRUSTED)
        before = standing


def test_a_time_that_no_process_keeps_to_is_refused() -> None:
    with pytest.raises(ValidationError, match="the minimum is 50ms"):
        LivenessConfig(suspect_after=0.001)

"""Judges from a worker's answers whether it makes progress. Pure: the caller passes answers and times.

trusted ─── silent, stuck or refusing ──▶ suspected ─── for replace_after ──▶ lost
   ▲                                          │                                │
   └─────────── an answer, and a new step or a probe that succeeds ────────────┘
"""

from __future__ import annotations

from enum import StrEnum

from baton.core.steps import StepProgress
from cluster.registry.liveness_config import LivenessConfig

STEP_FACTOR = 10.0
"""A step may take this many times as long as expected: other processes may use its cores, and kernels may be compiled
in it."""


class Standing(StrEnum):
    TRUSTED = "trusted"
    SUSPECTED = "suspected"
    LOST = "lost"


class ProgressJudge:
    """Judges one worker.

    Times are seconds of any clock that never goes back. It should stand still while the caller does not listen, so
    that delays of the caller do not count against the worker.

    Attributes:
        standing: the judgement as of the last :meth:`judge`.
        reason: why the worker is not trusted; empty if it is.
    """

    def __init__(self, config: LivenessConfig, now_s: float) -> None:
        self._config = config
        self.standing = Standing.TRUSTED
        self.reason = ""
        self._progress = StepProgress(0)
        self._asked_s: float | None = None  # when the first unanswered ping was sent
        self._probed_s: float | None = None  # when the open probe was sent
        self._active_s = now_s  # when num_steps changed, or a probe succeeded
        self._running_s = now_s  # since when the running step has been known
        self._refusal = self._inability = ""
        self._suspected_s = now_s
        self._is_proven = False  # whether it made a step, or a probe succeeded, since it was suspected

    def asked(self, now_s: float) -> None:
        """A ping was sent."""
        if self._asked_s is None:
            self._asked_s = now_s

    def answered(self, progress: StepProgress, now_s: float) -> None:
        """Takes the answer to a ping."""
        self._asked_s, self._refusal = None, ""
        is_new = progress.num_steps != self._progress.num_steps
        if is_new:
            self._active_s, self._is_proven = now_s, True
        if is_new or not progress.step_age_s:
            self._running_s = now_s
        self._progress = progress

    def refused(self, why: str) -> None:
        """Takes the failure of a connection, which needs no waiting: nothing listens, or the process has ended."""
        if self.standing is Standing.TRUSTED:  # later, the connections are the caller's own attempts to reconnect
            self._refusal = why

    def probing(self, now_s: float) -> None:
        """A probe was sent."""
        self._probed_s = now_s

    def proved(self, now_s: float) -> None:
        """The probe succeeded."""
        self._probed_s, self._inability = None, ""
        self._active_s, self._is_proven = now_s, True

    def probe_failed(self, inability: str = "") -> None:
        """The probe had no success.

        Args:
            inability: the worker's error; empty if the worker did not answer.
        """
        self._probed_s, self._inability = None, inability

    def wants_probe(self, now_s: float) -> bool:
        """Whether to send a probe: the worker answers, and is idle or must show that it has recovered."""
        if self._probed_s is not None or self._asked_s is not None:
            return False
        is_idle = not self._progress.step_age_s and now_s - self._active_s >= self._config.idle_check
        return is_idle or self.standing is not Standing.TRUSTED

    def judge(self, now_s: float) -> Standing:
        """Returns the standing, which it also sets."""
        fault = self._fault(now_s)
        if self.standing is Standing.TRUSTED:
            if fault:
                self._suspected_s, self._is_proven = now_s, False
                self.standing, self.reason = Standing.SUSPECTED, fault
        elif self._is_proven and not fault:
            self.standing, self.reason = Standing.TRUSTED, ""
        else:
            self.reason = fault or self.reason
            if now_s - self._suspected_s >= self._config.replace_after:
                self.standing = Standing.LOST
        return self.standing

    def _fault(self, now_s: float) -> str:
        """What is wrong with the worker; empty if nothing is."""
        limit_s = self._config.suspect_after
        if self._refusal or self._inability:
            return self._refusal or self._inability
        if self._asked_s is not None and now_s - self._asked_s >= limit_s:
            return f"it has not answered for {now_s - self._asked_s:.1f} s"
        progress = self._progress
        if progress.step_age_s:
            # The worker's own figure alone would include a time in which the whole machine stood still.
            age_s = min(progress.step_age_s, now_s - self._running_s)
            if age_s >= max(limit_s, STEP_FACTOR * progress.expected_step_s):
                return f"a step has run for {progress.step_age_s:.1f} s; expected are {progress.expected_step_s:.2g} s"
        elif self._probed_s is not None and now_s - max(self._probed_s, self._active_s) >= limit_s:
            return f"it is idle, but has not begun to compute a token within {limit_s:g} s"
        return ""

"""Shows `baton up` whether the controller answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from baton.core.steps import StepProgress
from cluster.registry.liveness_config import LivenessConfig
from cluster.registry.progress_judge import ProgressJudge, Standing

_LONGEST_PASS_S = 0.7
"""A longer time between two looks is a delay of the caller, and does not count against the controller."""


class ControllerWatch:
    """Judges the controller by its answers, and reports changes.

    Silence before the first answer is not judged, since its process may still be starting.

    Args:
        ask: calls the controller, and returns its answer to come: its process id.
        report: called with lines for people.
        clock: monotonic seconds.

    Attributes:
        pid: the controller's process id, once it has answered.
    """

    def __init__(
        self,
        config: LivenessConfig,
        ask: Callable[[], Future[int]],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pid: int | None = None
        self._config = config
        self._ask = ask
        self._report = report
        self._clock = clock
        self._judge = ProgressJudge(config, 0.0)
        self._looked_s = clock()
        self._listened_s = 0.0
        self._num_answers = 0
        self._answer: Future[int] | None = None

    @property
    def is_trusted(self) -> bool:
        """Whether the controller answered at the last :meth:`look`."""
        return self._judge.standing is Standing.TRUSTED

    @property
    def reason(self) -> str:
        """Why the controller is not trusted; empty if it is."""
        return self._judge.reason

    def look(self) -> bool:
        """Judges the controller. Returns whether to replace it. Must be called several times per second."""
        now_s = self._clock()
        self._listened_s += min(now_s - self._looked_s, _LONGEST_PASS_S)
        self._looked_s = now_s
        if self._answer is not None and self._answer.done():
            if self._answer.exception() is None:
                self.pid = self._answer.result()
                self._num_answers += 1
                self._judge.answered(StepProgress(self._num_answers), self._listened_s)
            self._answer = None
        if self._answer is None:
            self._answer = self._ask()
            if self._num_answers:
                self._judge.asked(self._listened_s)
        before = self._judge.standing
        standing = self._judge.judge(self._listened_s)
        if standing is not before:
            self._tell(standing)
        return standing is Standing.LOST

    def _tell(self, standing: Standing) -> None:
        if standing is Standing.TRUSTED:
            self._report("the controller answers again")
        elif standing is Standing.SUSPECTED:
            self._report(
                f"the controller may hang: {self.reason}. No router or worker is replaced or started meanwhile; if it "
                f"stays silent, it is replaced after {self._config.replace_after:g} s more"
            )
        else:
            self._report(f"the controller hangs: {self.reason}")

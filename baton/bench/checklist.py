"""What a load test needs so that its figures can be trusted, checked for each run.

Steady state is checked by the Mann-Kendall test for a trend (Mann 1945, Kendall 1975) over the mean TTFT of consecutive
blocks of requests, in the order in which they were due. Blocks, since requests that queue together are not independent.
A trend counts if it is significant and large: small ones are found in every long run.

In an open loop, requests that wait for each other make blocks alike, so that a busy server which keeps up has trends by
chance. There, a trend fails only if the queue grows too: in the second half of the load, fewer first tokens came than
requests were due. Either one alone leaves it unclear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import erfc, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.bench.latency import FEW_FOR_P99
from baton.bench.stage_result import StageResult

_LEAST_VARIATION = 0.1
_LEAST_STAGES = 3
_NUM_BLOCKS = 20
_LEAST_BLOCKS = 8
_LEAST_PER_BLOCK = 5
_SIGNIFICANCE = 0.01
_SUSPICION = 0.05
_LARGE_DRIFT = 0.1
_LARGE_LAG = 0.5


class Verdict(StrEnum):
    """The result of a check, from good to bad."""

    PASS = "pass"
    NOTE = "note"
    """The run was too short or too uniform for some conclusions, or its figures are unclear."""
    FAIL = "fail"
    """The server did not keep up, so the figures depend on the length of the run."""


_Judge = Callable[[StageResult], tuple[Verdict, str]]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the checklist."""

    name: str
    verdict: Verdict
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "check": self.name,
            "passed": self.verdict is Verdict.PASS,
            "verdict": str(self.verdict),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Drift:
    """A trend of the TTFT over a stage.

    Attributes:
        p_value: two-sided, of the Mann-Kendall test.
        change: Theil and Sen's slope over the whole stage, relative to the median block.
    """

    p_value: float
    change: float

    @property
    def is_drift(self) -> bool:
        return self.p_value < _SIGNIFICANCE and abs(self.change) > _LARGE_DRIFT

    @property
    def may_be_drift(self) -> bool:
        return self.p_value < _SUSPICION and abs(self.change) > _LARGE_DRIFT


@dataclass(frozen=True, slots=True)
class Flow:
    """What came and went in the second half of an open loop's load.

    Attributes:
        num_due: requests that were due.
        num_begun: requests that had their first token, or failed.
    """

    num_due: int
    num_begun: int

    @property
    def queue_grows(self) -> bool:
        """Whether the difference exceeds half of the standard deviation of the difference of two Poisson counts."""
        return self.num_due - self.num_begun > _LARGE_LAG * sqrt(self.num_due + self.num_begun)


def checklist(stages: Sequence[StageResult], num_levels: int | None = None) -> list[Check]:
    """The checks of a run; a check has the worst verdict of its stages.

    Args:
        num_levels: levels of load that were tried, if these are not all of them.
    """
    if not stages:
        return []
    return [
        _over_stages("varied lengths", stages, _varied_lengths),
        _several_stages(len(stages) if num_levels is None else num_levels),
        _over_stages("tail latencies", stages, _tails),
        _over_stages("steady state", stages, _steady),
    ]


def drift_of(values: Sequence[float]) -> Drift | None:
    """The trend of values in order; ``None`` for too few of them."""
    num_blocks = min(_NUM_BLOCKS, len(values) // _LEAST_PER_BLOCK)
    if num_blocks < _LEAST_BLOCKS:
        return None
    means = np.array([float(block.mean()) for block in np.array_split(np.array(values), num_blocks)])
    earlier, later = np.triu_indices(num_blocks, k=1)
    differences = means[later] - means[earlier]
    slope = float(np.median(differences / (later - earlier)))
    middle = float(np.median(means))
    change = slope * (num_blocks - 1) / middle if middle > 0 else 0.0
    return Drift(_trend_p_value(means, int(np.sign(differences).sum())), change)


def _trend_p_value(means: NDArray[np.float64], s: int) -> float:
    """Normal approximation with corrections for continuity and ties; exact enough from eight values on."""
    n = len(means)
    ties = sum(count * (count - 1) * (2 * count + 5) for count in Counter(means.tolist()).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0 or s == 0:
        return 1.0
    return erfc((abs(s) - 1) / sqrt(2 * variance))


def _over_stages(name: str, stages: Sequence[StageResult], judge: _Judge) -> Check:
    verdicts = [(stage.label, *judge(stage)) for stage in stages]
    worst = max((verdict for _, verdict, _ in verdicts), key=list(Verdict).index)
    reasons = "; ".join(f"{label}: {reason}" for label, verdict, reason in verdicts if verdict is worst)
    return Check(name, worst, reasons)


def _several_stages(count: int) -> Check:
    found = f"{count} level{'s' * (count != 1)} of load"
    if count >= _LEAST_STAGES:
        return Check("stages", Verdict.PASS, found)
    return Check("stages", Verdict.NOTE, f"{found}; give at least {_LEAST_STAGES}, such as --concurrency 1,4,16")


def _varied_lengths(stage: StageResult) -> tuple[Verdict, str]:
    answered = stage.answered
    found = []
    for name, lengths in (
        ("prompts", [sample.input_tokens or 0 for sample in answered]),
        ("answers", [sample.output_tokens for sample in answered]),
    ):
        variation = float(np.std(lengths) / np.mean(lengths)) if sum(lengths) else 0.0
        found.append((name, variation))
    shown = ", ".join(f"{name} vary by {variation:.0%}" for name, variation in found)
    if all(variation >= _LEAST_VARIATION for _, variation in found):
        return Verdict.PASS, shown
    return Verdict.NOTE, f"{shown} (sd / mean; real traffic varies, by {_LEAST_VARIATION:.0%} or more)"


def _tails(stage: StageResult) -> tuple[Verdict, str]:
    count = len(stage.answered)
    if count >= FEW_FOR_P99:
        return Verdict.PASS, f"{count} answers"
    return Verdict.NOTE, f"{count} answers; a p99 needs {FEW_FOR_P99}"


def _steady(stage: StageResult) -> tuple[Verdict, str]:
    values = [ttft for sample in stage.answered if (ttft := sample.ttft_s(from_send=False)) is not None]
    drift, flow, is_steady = drift_of(values), _flow_of(stage), stage.window.is_steady
    found = [] if is_steady else ["too short for a steady window"]
    if drift is None:
        found.append(f"{len(values)} answers; the drift test needs {_LEAST_BLOCKS * _LEAST_PER_BLOCK}")
    else:
        found.append(f"TTFT changed by {drift.change:+.0%}, p = {drift.p_value:.2g} (Mann-Kendall)")
    if flow is not None:
        found.append(f"{flow.num_begun} first tokens while the last {flow.num_due} requests came")
    queue_grows = flow is not None and flow.queue_grows
    if drift is not None and drift.is_drift and (queue_grows or (flow is None and is_steady)):
        return Verdict.FAIL, "; ".join(found)
    if queue_grows or (drift is not None and drift.may_be_drift):
        return Verdict.NOTE, "; ".join([*found, "unclear, more requests would tell"])
    return Verdict.PASS if is_steady and drift is not None else Verdict.NOTE, "; ".join(found)


def _flow_of(stage: StageResult) -> Flow | None:
    """``None`` for a closed loop, whose requests wait for answers."""
    run = stage.run
    if not run.stage.is_open:
        return None
    middle_s, end_s = (run.load_start_s + run.load_end_s) / 2, run.load_end_s
    begun_s = [sample.chunk_times_s[0] if sample.chunk_times_s else sample.finished_s for sample in run.samples]
    return Flow(
        num_due=sum(middle_s < sample.intended_s <= end_s for sample in run.samples),
        num_begun=sum(moment is not None and middle_s < moment <= end_s for moment in begun_s),
    )

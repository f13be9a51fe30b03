"""Calibration of predictions: correction factors, usual values, and the errors of past predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import exp, isfinite, log
from statistics import median

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_WINDOW = 48
_PRIOR_REQUESTS = 4.0
_LARGEST_LOG = log(4.0)
"""Bound of a factor's logarithm."""
_UNKNOWN_SPREAD = 0.3


class Calibration:
    """The usual ratio of what happened to what was predicted, over the last requests.

    Args:
        elsewhere: whose factor is expected while little is known here; else it is 1.

    Attributes:
        spread: relative; of single requests around what is predicted with the factor.
    """

    def __init__(self, elsewhere: Calibration | None = None) -> None:
        self._elsewhere = elsewhere
        self._logs: deque[float] = deque(maxlen=_WINDOW)
        self._middle = 0.0
        self.spread = _UNKNOWN_SPREAD

    @property
    def factor(self) -> float:
        count = len(self._logs)
        expected = log(self._elsewhere.factor) if self._elsewhere is not None else 0.0
        usual = (count * self._middle + _PRIOR_REQUESTS * expected) / (count + _PRIOR_REQUESTS)
        return exp(min(max(usual, -_LARGEST_LOG), _LARGEST_LOG))

    def observe(self, predicted_ms: float, actual_ms: float) -> None:
        """``predicted_ms`` is the prediction without the factor."""
        if not (isfinite(predicted_ms) and isfinite(actual_ms) and predicted_ms > 0 and actual_ms > 0):
            return
        self._logs.append(log(actual_ms) - log(predicted_ms))  # a ratio could overflow
        count = len(self._logs)
        self._middle = middle = median(self._logs)
        spread = 1.4826 * median(abs(value - middle) for value in self._logs)
        self.spread = (_PRIOR_REQUESTS * _UNKNOWN_SPREAD + count * spread) / (_PRIOR_REQUESTS + count)


class RegimeCalibration:
    """One calibration for workers that have their processor to themselves, and one for those that share it.

    Workers on CPUs of one node slow each other down, by as much as two to one, and no sample of a step tells. Prompts
    that a decode worker computes itself have one of their own: there, steps are shared with sequences that decode.
    """

    def __init__(self) -> None:
        self._alone = Calibration()
        self._contended = Calibration()
        self._local = Calibration(self._alone)

    def of(self, *, contended: bool, local: bool = False) -> Calibration:
        """
        Args:
            local: of local prefill; whether it was contended makes no difference then.
        """
        if local:
            return self._local
        return self._contended if contended else self._alone


class SlidingMedian:
    """The median of the last values; ``otherwise`` before the first."""

    def __init__(self, otherwise: float, window: int = 32) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self.value = otherwise

    def observe(self, value: float) -> None:
        if isfinite(value):
            self._values.append(value)
            self.value = median(self._values)


class ErrorWindow:
    """Relative errors of the last predictions."""

    def __init__(self, window: int = 512) -> None:
        self._errors: deque[float] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._errors)

    def observe(self, predicted_ms: float, actual_ms: float) -> None:
        if isfinite(predicted_ms) and isfinite(actual_ms) and actual_ms > 0:
            self._errors.append(abs(predicted_ms - actual_ms) / actual_ms)

    def quantile(self, share: float) -> float | None:
        """The error that ``share`` of the predictions stay under; None before the first."""
        ordered = sorted(self._errors)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


_DELIVERY_MS = 2.0
_OUTPUT_TOKENS = 64.0


class RequestHabits:
    """
    Attributes:
        delivery_ms: from the router to the prefill worker's queue, and of the first token back.
        claim_ms: between first token and decoding, beyond what the hand-off was predicted to take.
        output_tokens: of an answer.
        cached_tokens: of a prompt, where it was computed.
    """

    def __init__(self) -> None:
        self.delivery_ms = SlidingMedian(_DELIVERY_MS)
        self.claim_ms = SlidingMedian(0.0)
        self.output_tokens = SlidingMedian(_OUTPUT_TOKENS)
        self.cached_tokens = SlidingMedian(0.0)


TTFT = "ttft"
TPOT = "tpot"
_QUANTILES = (0.5, 0.95)


class PredictionErrors(Collector):
    """Relative errors of the last requests' TTFT and TPOT. Quantiles are NaN before the first."""

    def __init__(self) -> None:
        self._windows = {TTFT: ErrorWindow(), TPOT: ErrorWindow()}

    def observe(self, kind: str, predicted_ms: float, actual_ms: float) -> None:
        """Books a request. ``kind`` is :data:`TTFT` or :data:`TPOT`."""
        self._windows[kind].observe(predicted_ms, actual_ms)

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """JSON-ready: by kind the relative error's quantiles, and how many requests they are of."""
        return {
            kind: {
                **{f"p{100 * share:g}": _rounded(errors.quantile(share)) for share in _QUANTILES},
                "requests": len(errors),
            }
            for kind, errors in self._windows.items()
        }

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "baton_prediction_error_ratio",
            "How far predictions made at routing were from what happened, relative to it, over the last requests.",
            labels=["kind", "quantile"],
        )
        for kind, errors in self._windows.items():
            for share in _QUANTILES:
                error = errors.quantile(share)
                family.add_metric([kind, f"{share:g}"], float("nan") if error is None else error)
        yield family


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

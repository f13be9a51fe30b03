"""Calibration of predictions: correction factors, usual values, and the errors of past predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import exp, isfinite, log
from statistics import median

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.latency.estimates import USUAL_OUTPUT_TOKENS

_WINDOW = 48
_PRIOR_REQUESTS = 4.0
_LARGEST_LOG = log(4.0)
"""Bound of a factor's logarithm."""
_UNKNOWN_SPREAD = 0.3


class Calibration:
    """The median ratio of actual to predicted latency over the last requests.

    Args:
        elsewhere: calibration whose factor is the prior; ``None`` means a prior of 1.

    Attributes:
        spread: relative standard deviation of single requests around the calibrated prediction.
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
        """Learns from a request. ``predicted_ms`` is the prediction without the factor."""
        if not (isfinite(predicted_ms) and isfinite(actual_ms) and predicted_ms > 0 and actual_ms > 0):
            return
        self._logs.append(log(actual_ms) - log(predicted_ms))  # a ratio could overflow
        count = len(self._logs)
        self._middle = middle = median(self._logs)
        spread = 1.4826 * median(abs(value - middle) for value in self._logs)
        self.spread = (_PRIOR_REQUESTS * _UNKNOWN_SPREAD + count * spread) / (_PRIOR_REQUESTS + count)


class RegimeCalibration:
    """Calibrations for workers with a processor of their own, for those that share one, and for local prefill.

    Workers on CPUs of one node slow each other down by up to a factor of two, which step samples do not show. Local
    prefill has its own calibration, because its steps are shared with sequences that decode.
    """

    def __init__(self) -> None:
        self._alone = Calibration()
        self._contended = Calibration()
        self._local = Calibration(self._alone)

    def of(self, *, contended: bool, local: bool = False) -> Calibration:
        """The calibration of a regime.

        Args:
            contended: the two workers share a busy processor. Has no effect on local prefill.
            local: the decode worker computes the prompt.
        """
        if local:
            return self._local
        return self._contended if contended else self._alone


class SlidingMedian:
    """The median of the last values; ``otherwise`` before the first one."""

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
        """The ``share`` quantile of the errors; ``None`` before the first one."""
        ordered = sorted(self._errors)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


_DELIVERY_MS = 2.0


class RequestHabits:
    """Medians over the last requests.

    Attributes:
        delivery_ms: time from the router to the prefill worker's queue, plus that of the first token back.
        claim_ms: time between first token and decoding beyond the predicted hand-off.
        output_tokens: tokens of an answer.
        cached_tokens: cached tokens of a prompt on the worker that computed it.
    """

    def __init__(self) -> None:
        self.delivery_ms = SlidingMedian(_DELIVERY_MS)
        self.claim_ms = SlidingMedian(0.0)
        self.output_tokens = SlidingMedian(USUAL_OUTPUT_TOKENS)
        self.cached_tokens = SlidingMedian(0.0)


TTFT = "ttft"
TPOT = "tpot"
_QUANTILES = (0.5, 0.95)


class PredictionErrors(Collector):
    """Relative errors of the predicted TTFT and TPOT of the last requests. Quantiles are NaN before the first one."""

    def __init__(self) -> None:
        self._windows = {TTFT: ErrorWindow(), TPOT: ErrorWindow()}

    def observe(self, kind: str, predicted_ms: float, actual_ms: float) -> None:
        """Adds the error of a request. ``kind`` is :data:`TTFT` or :data:`TPOT`."""
        self._windows[kind].observe(predicted_ms, actual_ms)

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """The quantiles of the relative error and the number of requests, by kind; JSON-ready."""
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
            "Relative error of the predictions made at routing, over recent requests.",
            labels=["kind", "quantile"],
        )
        for kind, errors in self._windows.items():
            for share in _QUANTILES:
                error = errors.quantile(share)
                family.add_metric([kind, f"{share:g}"], float("nan") if error is None else error)
        yield family


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

"""How wrong predictions were, as Prometheus series and for ``baton status``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.latency.calibration import ErrorWindow

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
        """Nothing: the registry shall not ask for figures when this is registered."""
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

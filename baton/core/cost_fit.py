"""Learns a cost that is linear in a few features, from samples and a prior. numpy only.

    ms ≈ level · (features · coefficients)

The coefficients are a robust fit, which describes the typical sample. Predictions need the mean, since a request lasts
many steps. The level restores it, from recent samples that are clipped at the end of the usual noise.

A step that takes seconds because a kernel is compiled is no slow step: the next one of its kind is back to normal. A
machine that became slower stays so. Therefore an outlier counts only once the next samples of its kind confirm it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from math import frexp, log
from operator import mul

import numpy as np

from baton.core.robust_fit import Features, Floats, SampleWindow, fit

GUESS_WEIGHT = 0.001
"""Weight of a prior that is a guess, in samples. It settles what the samples leave open, and biases costs by 1 %."""
MEASURED_WEIGHT = 3.0
"""Weight of a prior that was measured elsewhere, in samples."""

_OUTLIER_FACTOR = 10.0
"""An outlier takes more than this many times what was expected. Noise and a busy machine reach about 4."""
_TRUSTED_SAMPLES = 8
"""An expectation from fewer samples cannot identify outliers."""
_CONFIRMATIONS = 3
"""Outliers of one kind in a row that count as the new normal."""

_REFIT_GROWTH = 1.15
"""Growth of the number of samples after which the fit is repeated, so that a new one learns fast."""
_REFIT_EVERY_S = 2.0
"""Time after which the fit is repeated. It takes up to 2 ms."""

_LEVEL_SAMPLES = 384
_LEVEL_HALF_LIFE_S = 25.0
"""The level follows the load of the machine within half a minute."""
_LEVEL_PRIOR_SAMPLES = 8
_SMALLEST_WEIGHT = 1e-6
"""Of samples before a long pause, so that their mean stays defined."""
_CUT_SDS = 4.0
"""Standard deviations beyond which the level counts a sample as less."""
_SMALLEST_CUT, _LARGEST_CUT = 1.3, 2.0
"""Bounds of this cut, as ratios to the median."""

UNKNOWN_SD = 0.5
"""Relative standard deviation before there are samples."""
_SMALLEST_SD = 0.03
_MAD_TO_SD = 1.4826
_SMALLEST_SHARE = 0.01
"""Lower bound of a coefficient as a share of the prior's: one that appears to be zero may still matter."""
_SMALLEST_MS, _LARGEST_MS = 1e-3, 3.6e6
_LARGEST_FEATURE = 1e12


class CostFit:
    """A linear cost, from samples and a prior.

    Args:
        prior: ``[num_features]``, above zero. Samples show its scale, so it mainly contributes its shape.
        prior_weight: :data:`GUESS_WEIGHT` or :data:`MEASURED_WEIGHT`.

    Attributes:
        coefficients: ``[num_features]``, milliseconds, as of the last fit, with the level included.
        sd: standard deviation of a single sample, relative to the prediction.
        num_samples: number of samples that were learned from.
    """

    def __init__(self, prior: Sequence[float], prior_weight: float = GUESS_WEIGHT) -> None:
        self.coefficients: Features = tuple(prior)
        self.sd = UNKNOWN_SD
        self.num_samples = 0
        self._prior = np.array(prior, dtype=np.float64)
        self._prior_weight = prior_weight
        self._window = SampleWindow()
        self._recent: deque[tuple[float, Features, float]] = deque(maxlen=_LEVEL_SAMPLES)
        self._held: dict[Hashable, list[tuple[Features, float]]] = {}
        self._num_fitted = 0
        self._fitted_s = float("-inf")

    def ms(self, features: Sequence[float]) -> float:
        """The expected cost."""
        return float(sum(map(mul, self.coefficients, features)))

    def observe(self, features: Features, ms: float, now_s: float) -> bool:
        """Adds a sample, and repeats the fit now and then. Returns whether it did."""
        self.add(features, ms, now_s)
        is_due = now_s - self._fitted_s >= _REFIT_EVERY_S or self.num_samples >= _REFIT_GROWTH * self._num_fitted
        return is_due and self.refit(now_s)

    def add(self, features: Features, ms: float, now_s: float) -> None:
        """Adds a sample for the next fit.

        Drops impossible samples, and outliers that the next samples do not confirm.
        """
        if not is_plausible(ms) or not _are_plausible(features):
            return
        for own_features, own_ms in self._admit(features, ms):
            self._take(own_features, own_ms, now_s)

    def refit(self, now_s: float) -> bool:
        """Repeats the fit if there are new samples. Returns whether there were."""
        if self.num_samples == self._num_fitted:
            return False
        had_trust = self._num_fitted >= _TRUSTED_SAMPLES
        self._fit(now_s)
        if not had_trust:
            self._review(now_s)
        return True

    def _take(self, features: Features, ms: float, now_s: float) -> None:
        self.num_samples += 1
        self._window.add(features, ms, now_s)
        self._recent.append((now_s, features, ms))

    def _review(self, now_s: float) -> None:
        """Drops outliers among the first samples, which were taken on trust."""
        samples = list(self._recent)
        kept = [sample for sample in samples if sample[2] <= _OUTLIER_FACTOR * self.ms(sample[1])]
        if len(kept) < len(samples):
            self._window, self.num_samples = SampleWindow(), 0
            self._recent.clear()
            for added_s, features, ms in kept:
                self._take(features, ms, added_s)
            self._fit(now_s)

    def _fit(self, now_s: float) -> None:
        features, ms, weights = self._window.table(now_s)
        prior = self._scale_of(features, ms) * self._prior
        fitted = prior
        for prior_weight in (self._prior_weight, MEASURED_WEIGHT):  # the second time, less of a wrong prior is left
            fitted = np.maximum(fit(features, ms, weights, fitted, prior_weight), _SMALLEST_SHARE * prior)
        self.coefficients = tuple((self._measure_level(fitted, now_s) * fitted).tolist())
        self._num_fitted, self._fitted_s = self.num_samples, now_s

    def _admit(self, features: Features, ms: float) -> list[tuple[Features, float]]:
        """The samples to learn from now, oldest first."""
        expected_ms = self.ms(features)
        kind = (tuple(map(bool, features)), frexp(expected_ms)[1])
        if self.num_samples < _TRUSTED_SAMPLES or ms <= _OUTLIER_FACTOR * expected_ms:
            if self._held:
                self._held.pop(kind, None)
            return [(features, ms)]
        held = self._held.setdefault(kind, [])
        held.append((features, ms))
        return [] if len(held) < _CONFIRMATIONS else self._held.pop(kind)

    def _scale_of(self, features: Floats, ms: Floats) -> float:
        """The speed of what is measured, relative to the prior's."""
        usual = log(float(np.median(ms / (features @ self._prior))))
        return float(np.exp(len(ms) * usual / (len(ms) + self._prior_weight)))

    def _measure_level(self, fitted: Floats, now_s: float) -> float:
        """The clipped mean ratio of recent samples to the fit. Also updates ``sd``."""
        times, rows, measured = zip(*self._recent, strict=True)
        base = np.array(rows) @ fitted
        ratios = np.array(measured) / base
        middle = float(np.median(ratios))
        spread = max(_SMALLEST_SD, _MAD_TO_SD * float(np.median(np.abs(ratios / middle - 1.0))))
        self.sd = _blend(UNKNOWN_SD, spread, len(ratios))
        most = middle * min(max(1.0 + _CUT_SDS * spread, _SMALLEST_CUT), _LARGEST_CUT)
        weights = np.maximum(0.5 ** ((now_s - np.array(times)) / _LEVEL_HALF_LIFE_S), _SMALLEST_WEIGHT)
        parts = weights * base
        mean = float(np.dot(parts, np.minimum(ratios, most)) / parts.sum())
        return _blend(1.0, mean, float(weights.sum()))


def is_plausible(ms: float) -> bool:
    """Whether a step can take so long."""
    return _SMALLEST_MS < ms < _LARGEST_MS


def _are_plausible(features: Sequence[float]) -> bool:
    return min(features) >= 0.0 and 0.0 < max(features) < _LARGEST_FEATURE


def _blend(before: float, measured: float, count: float) -> float:
    return (_LEVEL_PRIOR_SAMPLES * before + count * measured) / (_LEVEL_PRIOR_SAMPLES + count)

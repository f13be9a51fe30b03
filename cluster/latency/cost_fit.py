"""Linear costs fitted per member, with the group's fit as a prior, so that a new member predicts well at once.

    member's ms = level · (features · member's coefficients)         level follows the last half minute
    member's coefficients  ◀─ pulled towards ─  scale · group's coefficients  ◀─ pulled towards ─  a prior

The robust fit describes the typical sample. Predictions need the mean, since a request lasts many steps. The level
restores it, from samples that are clipped at the end of the usual noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import exp, frexp, log
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np

from baton.core.step_outliers import TRUSTED_SAMPLES, OutlierGuard
from cluster.latency.robust_fit import Features, Floats, SampleWindow, fit

_GROUP_PRIOR_WEIGHT = 0.005
_MEASURED_PRIOR_WEIGHT = 1.0
_MEMBER_PRIOR_WEIGHT = 3.0
_LEVEL_SAMPLES = 384
_LEVEL_HALF_LIFE_S = 25.0
_LEVEL_PRIOR_SAMPLES = 8
_CUT_SDS = 4.0
_SMALLEST_CUT, _LARGEST_CUT = 1.3, 4.0
_LARGEST_SCALE = 20.0
_FIT_GROWTH = 1.15
"""Growth of the number of samples after which a fit is repeated."""
_FIT_EVERY_S = 5.0
"""Time after which a fit is repeated."""
_UNKNOWN_SD = 0.5
_SMALLEST_SD = 0.03
_SMALLEST_SHARE = 0.02
_SMALLEST_MS, _LARGEST_MS = 1e-3, 3.6e6
_LARGEST_FEATURE = 1e12


class CostFit:
    """Coefficients from samples and a prior.

    Args:
        prior: ``[num_features]``, above zero.
    """

    def __init__(self, prior: Floats, prior_weight: float) -> None:
        self.prior = prior
        self.coefficients = prior
        self._prior_weight = prior_weight
        self._window = SampleWindow()
        self._num_added = 0
        self._num_fitted = 0
        self._fitted_s = float("-inf")

    @property
    def num_samples(self) -> int:
        """The number of all samples added so far."""
        return self._num_added

    def add(self, features: Features, ms: float, now_s: float) -> None:
        self._num_added += 1
        self._window.add(features, ms, now_s)

    def refresh(self, now_s: float) -> bool:
        """Repeats the fit if enough samples or time have come since the last one. Returns whether it did."""
        if self._num_added == self._num_fitted:
            return False
        if self._num_added < _FIT_GROWTH * self._num_fitted and now_s - self._fitted_s < _FIT_EVERY_S:
            return False
        self.coefficients = fit(*self._window.table(now_s), self.prior, self._prior_weight)
        self._num_fitted, self._fitted_s = self._num_added, now_s
        return True


class CostGroup(CostFit):
    """The fit of a group, from the samples of all members, scaled to the speed of the median member."""

    def __init__(self, prior: Floats, prior_weight: float) -> None:
        super().__init__(prior, prior_weight)
        self._log_scales: WeakKeyDictionary[MemberCost, float] = WeakKeyDictionary()

    def set_scale(self, member: MemberCost, scale: float) -> None:
        """Sets the ratio of a member's costs to the group's."""
        self._log_scales[member] = log(scale)

    def relative_scale(self, member: MemberCost) -> float:
        """The ratio of a member's costs to those of the median member; 1 for a single member.

        Without it, the group's coefficients and all scales could drift apart in opposite directions.
        """
        own = self._log_scales.get(member, 0.0)
        return exp(own - median(self._log_scales.values())) if self._log_scales else 1.0


class MemberCost:
    """The fitted cost of one worker or one link.

    Attributes:
        num_samples: number of samples learned from so far.
        coefficients: the coefficients for predictions, with the level included.
        sd: standard deviation of a single sample, relative to the prediction.
    """

    def __init__(self, group: CostGroup) -> None:
        self._group = group
        self._fit = CostFit(group.coefficients, _MEMBER_PRIOR_WEIGHT)
        self._recent: deque[tuple[float, Features, float]] = deque(maxlen=_LEVEL_SAMPLES)
        self.num_samples = 0
        self.scale = 1.0
        self.coefficients: Features = tuple(group.coefficients.tolist())
        self.sd = _UNKNOWN_SD
        self._guard: OutlierGuard[tuple[Features, float]] = OutlierGuard()

    def observe(self, samples: Iterable[tuple[Features, float]], now_s: float) -> None:
        """Learns from (features, milliseconds).

        Drops implausible samples, and outliers that the next samples do not confirm.
        """
        kept = [
            admitted for features, ms in samples if is_plausible(features, ms) for admitted in self._admit(features, ms)
        ]
        if not kept:
            return
        scale = self._group.relative_scale(self)
        for features, ms in kept:
            self._fit.add(features, ms, now_s)
            self._group.add(features, ms / scale, now_s)
            self._recent.append((now_s, features, ms))
        self.num_samples = self._fit.num_samples
        self._group.refresh(now_s)
        self._update(now_s)

    def _admit(self, features: Features, ms: float) -> list[tuple[Features, float]]:
        expected_ms = float(np.dot(features, self.coefficients))
        kind = (tuple(value > 0 for value in features), frexp(expected_ms)[1])
        is_trusted = self.num_samples >= TRUSTED_SAMPLES and expected_ms > 0
        return self._guard.admit(kind, (features, ms), ms / expected_ms if is_trusted else 1.0)

    def follow_group(self) -> None:
        """Takes the group's coefficients, as long as the member has no samples of its own."""
        if not self.num_samples:
            self.coefficients = tuple(self._group.coefficients.tolist())

    def _update(self, now_s: float) -> None:
        times, rows, measured = zip(*self._recent, strict=True)
        features, ms = np.array(rows), np.array(measured)
        self._update_scale(features, ms)
        group = self.scale * self._group.coefficients
        self._fit.prior = np.maximum(group, _floor_of(group, self.scale * self._group.prior))
        self._fit.refresh(now_s)
        weights = 0.5 ** ((now_s - np.array(times)) / _LEVEL_HALF_LIFE_S)
        level = self._measure_level(features, ms, weights)
        self.coefficients = tuple((level * self._fit.coefficients).tolist())

    def _update_scale(self, features: Floats, ms: Floats) -> None:
        ratios = ms / np.maximum(features @ self._group.coefficients, 1e-6)
        count = len(ratios)
        usual = _blend(log(self.scale), log(float(np.median(ratios))), count)
        self.scale = min(max(exp(usual), 1 / _LARGEST_SCALE), _LARGEST_SCALE)
        self._group.set_scale(self, self.scale)

    def _measure_level(self, features: Floats, ms: Floats, weights: Floats) -> float:
        """The clipped mean ratio of measurements to the fit. Also updates ``sd``."""
        base = np.maximum(features @ self._fit.coefficients, 1e-6)
        ratios = ms / base
        middle = float(np.median(ratios))
        spread = max(_SMALLEST_SD, 1.4826 * float(np.median(np.abs(ratios / middle - 1.0))))
        self.sd = _blend(_UNKNOWN_SD, spread, len(ratios))
        most = middle * min(max(1.0 + _CUT_SDS * spread, _SMALLEST_CUT), _LARGEST_CUT)
        parts = weights * base
        mean = float(np.dot(parts, np.minimum(ratios, most)) / parts.sum())
        return _blend(1.0, mean, float(weights.sum()))


def _blend(before: float, measured: float, count: float) -> float:
    return (_LEVEL_PRIOR_SAMPLES * before + count * measured) / (_LEVEL_PRIOR_SAMPLES + count)


def _floor_of(coefficients: Floats, prior: Floats) -> Floats:
    """Lower bound of a member's prior, since a coefficient that is zero for the group may be positive for a member."""
    known = float((coefficients / prior).max())
    return _SMALLEST_SHARE * known * prior


def is_plausible(features: Features, ms: float) -> bool:
    """Whether the values of a sample are in a plausible range."""
    return (
        _SMALLEST_MS < ms < _LARGEST_MS and all(0.0 <= value < _LARGEST_FEATURE for value in features) and any(features)
    )


def new_group(prior: Sequence[float], *, is_measured: bool = False) -> CostGroup:
    """Creates a group for members of one kind.

    Args:
        prior: initial coefficients, above zero.
        is_measured: the prior comes from an earlier run and gets more weight than a guess.
    """
    return CostGroup(np.array(prior, dtype=np.float64), _MEASURED_PRIOR_WEIGHT if is_measured else _GROUP_PRIOR_WEIGHT)

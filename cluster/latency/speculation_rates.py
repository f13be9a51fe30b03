"""How many tokens a decoding sequence gets from a step, measured. Larger batches speculate less, so by batch size."""

from __future__ import annotations

from baton.core.step_samples import StepSample

_KEEP = 0.985
"""Of what is known, with each further step: the last 70 or so count."""
_PRIOR_SEQUENCES = 6.0


class _Sums:
    """Exponentially weighted sums over steps."""

    __slots__ = ("decoding", "drafted", "emitted")

    def __init__(self) -> None:
        self.decoding = self.emitted = self.drafted = 0.0

    def add(self, decoding: float, emitted: float, drafted: float) -> None:
        self.decoding = _KEEP * self.decoding + decoding
        self.emitted = _KEEP * self.emitted + emitted
        self.drafted = _KEEP * self.drafted + drafted

    def blended(self, tokens: float, drafted: float) -> tuple[float, float]:
        """Both rates, as far as they are measured; the arguments are what to expect before."""
        known = self.decoding + _PRIOR_SEQUENCES
        return (self.emitted + _PRIOR_SEQUENCES * tokens) / known, (self.drafted + _PRIOR_SEQUENCES * drafted) / known


class SpeculationRates:
    """Per decoding sequence and step: tokens emitted, and tokens drafted.

    Args:
        elsewhere: rates of the worker's group, which are expected while nothing is measured here.
    """

    def __init__(self, elsewhere: SpeculationRates | None = None) -> None:
        self._elsewhere = elsewhere
        self._all = _Sums()
        self._by_batch: dict[int, _Sums] = {}
        self._num_observed = 0
        self._asked: dict[int, tuple[float, float]] = {}
        self._asked_after = 0

    def observe(self, sample: StepSample) -> None:
        """Samples that contradict themselves are left out."""
        if not 0 < sample.decoding <= sample.sequences or not 0 <= sample.accepted_tokens <= sample.drafted_tokens:
            return
        emitted = sample.decoding + sample.accepted_tokens
        for sums in (self._all, self._by_batch.setdefault(sample.decoding.bit_length(), _Sums())):
            sums.add(sample.decoding, emitted, sample.drafted_tokens)
        self._num_observed += 1
        if self._elsewhere is not None:
            self._elsewhere.observe(sample)

    def rates(self, batch: int) -> tuple[float, float]:
        """(tokens emitted, tokens drafted), each per sequence and step of ``batch`` sequences."""
        size, num_observed = batch.bit_length(), (self._elsewhere or self)._num_observed
        if self._asked_after != num_observed:  # a routing decision asks for every worker, several times
            self._asked.clear()
            self._asked_after = num_observed
        found = self._asked.get(size)
        if found is None:
            found = self._asked[size] = self._blended(batch)
        return found

    def _blended(self, batch: int) -> tuple[float, float]:
        before = self._elsewhere.rates(batch) if self._elsewhere is not None else (1.0, 0.0)
        overall = self._all.blended(*before)
        own = self._by_batch.get(batch.bit_length())
        return own.blended(*overall) if own is not None else overall

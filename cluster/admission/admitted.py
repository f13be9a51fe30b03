"""Admitted requests: their work in progress, and safety margins learned from their outcomes.

Predictions are uncertain: later requests share the steps, and answer lengths vary. So a prediction must stay below
its target by a factor, which each outcome adjusts: a miss raises it by much, a hit lowers it by little, and it settles
where the wanted share of targets is met. This is a stochastic approximation of a quantile (Robbins and Monro, 1951),
used for predictions as in Gibbs and Candès, *Adaptive Conformal Inference Under Distribution Shift* (2021).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, inf
from statistics import NormalDist

from baton.core.outcomes import FINISHED
from baton.core.slo import SloClass
from cluster.admission import tuning
from cluster.admission.room import Factors, RoomCheck
from cluster.admission.waiting_time import WorkInProgress
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import RouteDecision


class SafetyMargin:
    """The margin of one target of a class.

    Args:
        miss_share: share of the requests that may miss the target.
    """

    def __init__(self, miss_share: float) -> None:
        self._miss_share = min(max(miss_share, tuning.SMALLEST_MISS_SHARE), 0.5)
        self.factor = min(tuning.LARGEST_MARGIN, exp(tuning.FIRST_SD * NormalDist().inv_cdf(1 - self._miss_share)))
        self._stay = 0.0

    def observe(self, used_factor: float, *, kept: bool) -> None:
        """Learns from a request that came close to its target or missed it.

        Args:
            used_factor: the factor with which it was admitted.
        """
        fall, rise = tuning.MARGIN_STEP * self._miss_share, tuning.MARGIN_STEP * (1 - self._miss_share)
        if not kept and used_factor * tuning.LATE_OUTCOME_RATIO < self.factor:
            self._stay = min(tuning.LARGEST_STAY, self._stay + rise)
        elif not kept:
            self.factor = min(tuning.LARGEST_MARGIN, self.factor * exp(rise))
        elif self._stay > 0:
            self._stay -= fall
        else:
            self.factor = max(1.0, self.factor * exp(-fall))


class ClassMargins:
    """The margins of one class. Its percentile covers both targets, so each gets half of the allowed misses."""

    def __init__(self, slo: SloClass) -> None:
        self.objective = slo.objective
        miss_share = tuning.MISS_SHARE_AIM * (1 - slo.objective) / 2
        self.ttft = SafetyMargin(miss_share)
        self.tpot = SafetyMargin(miss_share)

    @property
    def factors(self) -> Factors:
        return Factors(self.ttft.factor, self.tpot.factor)


@dataclass(slots=True)
class _Admitted:
    prefill_id: str | None
    decode_id: str
    dispatched_s: float
    check: RoomCheck
    factors: Factors
    had_room: bool
    max_tokens: int
    has_first_token: bool = False


class AdmittedWork:
    """Sequences between dispatch and end, and the margins learned from their outcomes.

    Args:
        classes: the SLO classes of the configuration.
    """

    def __init__(self, classes: Iterable[SloClass]) -> None:
        self.in_progress = WorkInProgress()
        self._margins: dict[str, ClassMargins] = {}
        self.set_classes(classes)
        self._admitted: dict[str, _Admitted] = {}
        self._residents: dict[str, dict[str, float]] = {}
        self._num_prompts: Counter[str] = Counter()
        """Prompts in progress by prefill worker. Workers without any have no entry."""

    def set_classes(self, classes: Iterable[SloClass]) -> None:
        """Adds classes. A class whose percentile is unchanged keeps its margins, and removed ones remain for their
        requests."""
        for slo in classes:
            known = self._margins.get(slo.name)
            if known is None or known.objective != slo.objective:
                self._margins[slo.name] = ClassMargins(slo)

    def factors(self, slo: SloClass) -> Factors:
        """The present margins of a class."""
        return self._of(slo).factors

    def all_factors(self) -> Mapping[str, Factors]:
        """The present margins by class."""
        return {name: margins.factors for name, margins in self._margins.items()}

    def residents_tpot_ms(self, decode_id: str) -> float:
        """The strictest allowed TPOT among the sequences on a decode worker; infinity if there are none."""
        return min(self._residents.get(decode_id, {}).values(), default=inf)

    def computes_prompts(self, prefill_id: str) -> bool:
        """Whether the prefill worker has prompts to compute."""
        return prefill_id in self._num_prompts

    def dispatched(
        self, record: RequestRecord, decision: RouteDecision, check: RoomCheck, now_s: float, *, had_room: bool
    ) -> None:
        """Counts a dispatched sequence.

        Args:
            had_room: True if there was room, so that a miss is an error of the prediction.
        """
        request, prefill_id, decode_id = record.request, decision.prefill_id, decision.decode_id
        max_tokens = request.params.max_tokens
        self._forget(request.request_id)
        self._admitted[request.request_id] = _Admitted(
            prefill_id, decode_id, now_s, check, self.factors(request.slo), had_room, max_tokens, bool(record.token_ids)
        )
        self._residents.setdefault(decode_id, {})[request.request_id] = check.allowed_tpot_ms
        if not record.token_ids:
            self.in_progress.num_prompts += 1
            if prefill_id is not None:
                self._num_prompts[prefill_id] += 1
        self.in_progress.num_sequences += 1
        self.in_progress.max_tokens += max_tokens

    def first_token(self, record: RequestRecord) -> None:
        """Counts the first token of a sequence. Idempotent."""
        admitted = self._admitted.get(record.request.request_id)
        if admitted is not None and not admitted.has_first_token:
            self._prompt_has_ended(admitted)

    def ended(self, record: RequestRecord, now_s: float) -> None:
        """Counts the end of a sequence and learns from its outcome. Idempotent."""
        admitted = self._forget(record.request.request_id)
        if admitted is None:
            return
        if record.finish_reason is not None and str(record.finish_reason) in FINISHED:
            self.in_progress.observe_stay(now_s - admitted.dispatched_s)
            if record.attempt == 1 and admitted.had_room:
                self._learn(record, admitted)

    def _forget(self, request_id: str) -> _Admitted | None:
        admitted = self._admitted.pop(request_id, None)
        if admitted is None:
            return None
        if not admitted.has_first_token:
            self._prompt_has_ended(admitted)
        self.in_progress.num_sequences -= 1
        self.in_progress.max_tokens -= admitted.max_tokens
        residents = self._residents[admitted.decode_id]
        del residents[request_id]
        if not residents:
            del self._residents[admitted.decode_id]
        return admitted

    def _prompt_has_ended(self, admitted: _Admitted) -> None:
        admitted.has_first_token = True
        self.in_progress.num_prompts -= 1
        if admitted.prefill_id is not None:
            self._num_prompts[admitted.prefill_id] -= 1
            if not self._num_prompts[admitted.prefill_id]:
                del self._num_prompts[admitted.prefill_id]

    def _learn(self, record: RequestRecord, admitted: _Admitted) -> None:
        margins, timeline, check = self._of(record.request.slo), record.timeline, admitted.check
        ttft_ms, tpot_ms = timeline.ttft_ms, timeline.tpot_ms(len(record.token_ids))
        if check.is_lost:  # it was admitted with the expectation of a miss
            return
        # A hit far from the limit says nothing about the margin; a miss does.
        if ttft_ms is not None:
            kept = ttft_ms <= check.ttft_target_ms
            if check.is_near_ttft or not kept:
                margins.ttft.observe(admitted.factors.ttft, kept=kept)
        if tpot_ms is not None:
            kept = tpot_ms <= check.tpot_target_ms
            if check.is_near_tpot or not kept:
                margins.tpot.observe(admitted.factors.tpot, kept=kept)

    def _of(self, slo: SloClass) -> ClassMargins:
        margins = self._margins.get(slo.name)
        if margins is None:
            margins = self._margins[slo.name] = ClassMargins(slo)
        return margins

"""Counts every request's work while it is under way, and says afterwards how wrong its prediction was."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

from baton.core.request import FinishReason
from baton.core.timeline import Event, Timeline, TransferPart
from cluster.latency.error_metrics import TPOT, TTFT, PredictionErrors
from cluster.latency.estimates import UNKNOWN_FORECAST
from cluster.latency.habits import RequestHabits
from cluster.latency.latency_model import LatencyModel
from cluster.latency.ledger import WorkLedger
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import Booking, RequestRecord
from cluster.routing.base import RouteDecision
from cluster.routing.route_forecaster import RouteForecaster

_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


class RequestPredictions(RequestObserver):
    """Keeps the ledger of work in progress, and teaches the model how its predictions turned out.

    Args:
        errors: gets those of every finished request.
        clock: monotonic seconds; that of the timelines.

    Attributes:
        forecaster: of routes, from what was learned so far.
    """

    def __init__(
        self, model: LatencyModel, errors: PredictionErrors, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self.ledger = WorkLedger()
        self.errors = errors
        self.habits = RequestHabits()
        self.forecaster = RouteForecaster(model, self.habits)
        self._clock = clock
        self._names = itertools.count(1)

    def begin(self, record: RequestRecord, decision: RouteDecision) -> Booking:
        """Counts the work of an attempt from now on, until :meth:`end`."""
        name = f"{record.request.request_id}#{next(self._names)}"
        decodes = decision.prefill_id is None or record.request.params.max_tokens > 1
        booking = Booking(name, decision.prefill_id or "", decision.decode_id, decision.forecast, decodes)
        num_known = len(record.request.prompt_token_ids) + len(record.token_ids)
        cached = decision.cached_tokens
        self.ledger.begin_prompt(booking.computing_id, name, num_known - cached, cached, self._clock(), record.urgency)
        if decodes:
            usual, most = self.habits.output_tokens.value, record.request.params.max_tokens - len(record.token_ids)
            self.ledger.begin_decoding(
                booking.decode_id, name, num_known, record.request.slo.tpot_s, max(0, int(min(usual, most)))
            )
        record.booking = booking
        if decision.forecast is not UNKNOWN_FORECAST and not record.token_ids:
            record.timeline.attributes.update(
                predicted_ttft_ms=round(decision.ttft_ms, 3), predicted_tpot_ms=round(decision.tpot_ms, 3)
            )
        return booking

    def tokens(self, record: RequestRecord, num_tokens: int) -> None:
        """The first tokens of an attempt mean that its prompt is computed."""
        booking = record.booking
        if booking is None:
            return
        if not booking.is_computed:
            booking.is_computed = True
            self.ledger.end_prompt(booking.computing_id, booking.name, self._clock())
        self.ledger.grow(booking.decode_id, booking.name, num_tokens)

    def end(self, booking: Booking) -> None:
        """The attempt is over, or will never begin; a second time changes nothing."""
        self.ledger.end_prompt(booking.computing_id, booking.name, self._clock(), is_computed=False)
        self.ledger.end_decoding(booking.decode_id, booking.name)

    def ended(self, record: RequestRecord) -> None:
        booking = record.booking
        if booking is None or booking.forecast is UNKNOWN_FORECAST or record.attempt != 1:
            return
        timeline = record.timeline
        self._learn_transfer(booking, timeline)
        if record.finish_reason in _FINISHED:
            self._learn_request(booking, record, timeline)

    def _learn_transfer(self, booking: Booking, timeline: Timeline) -> None:
        sent = [part for part in timeline.parts if part.acknowledged_s]
        if sent and booking.prefill_id:
            link = (booking.prefill_id, booking.decode_id)
            num_bytes = sum(part.num_bytes for part in sent) * _native_share(timeline.attributes)
            self.model.observe_transfer(link, round(num_bytes), busy_s(sent) * 1e3)

    def _learn_request(self, booking: Booking, record: RequestRecord, timeline: Timeline) -> None:
        num_output, forecast, habits = len(record.token_ids), booking.forecast, self.habits
        habits.output_tokens.observe(num_output)
        habits.cached_tokens.observe(record.num_cached_tokens)
        there = timeline.between_ms(Event.ROUTED, Event.PREFILL_QUEUED)
        back = timeline.between_ms(Event.FIRST_TOKEN_SAMPLED, Event.FIRST_TOKEN)
        if there is not None and back is not None:
            habits.delivery_ms.observe(max(0.0, there) + max(0.0, back))
        handoff_ms = timeline.between_ms(Event.FIRST_TOKEN, Event.DECODE_STARTED)
        if handoff_ms is not None and not forecast.local:
            habits.claim_ms.observe(handoff_ms - forecast.exposed_ms)
        ttft_ms, tpot_ms = timeline.ttft_ms, timeline.tpot_ms(num_output)
        regime = {"contended": forecast.contended, "local": forecast.local}
        if ttft_ms is not None:
            self.errors.observe(TTFT, forecast.ttft_ms, ttft_ms)
            calibration = self.model.ttft_calibration.of(**regime)
            calibration.observe(forecast.model_ttft_ms, ttft_ms - forecast.before_ms)
        if tpot_ms is not None:
            self.errors.observe(TPOT, forecast.tpot_ms, tpot_ms)
            self.model.tpot_calibration.of(**regime).observe(forecast.model_tpot_ms, tpot_ms)


def _native_share(attributes: Mapping[str, str | int | float | bool]) -> float:
    """How many bytes of KV as workers hold it a byte on its way stands for; predictions count the former."""
    moved, spared = (attributes.get(name, 0) for name in ("kv_bytes", "kv_spared_bytes"))
    return 1 + float(spared) / float(moved) if moved else 1.0


def busy_s(parts: list[TransferPart]) -> float:
    """Seconds in which at least one of the parts, which come in order, was on its way."""
    total, until_s = 0.0, float("-inf")
    for part in parts:
        total += max(0.0, part.acknowledged_s - max(part.started_s, until_s))
        until_s = max(until_s, part.acknowledged_s)
    return total

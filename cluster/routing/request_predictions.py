"""Predicts the latency of each route for a request, tracks its work in progress, and learns from the outcome.

The formulas are in ``docs/routing.md``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from baton.core.request import FinishReason
from baton.core.robust_fit import Floats
from baton.core.timeline import Event, Timeline, TransferPart
from cluster.latency.calibration import TPOT, TTFT, PredictionErrors, RegimeCalibration, RequestHabits
from cluster.latency.cost_table import PromptCosts
from cluster.latency.estimates import UNKNOWN_FORECAST
from cluster.latency.latency_model import LatencyModel
from cluster.latency.ledger import WorkLedger
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import Booking, RequestRecord
from cluster.routing.routing_contracts import Bools, Ints, RouteDecision, RouteForecasts, RoutingRequest, WorkerSnapshot

_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


class RequestPredictions(RequestObserver):
    """Keeps the ledger of work in progress, and calibrates the model with the outcomes of its predictions.

    Args:
        errors: collects the prediction errors of finished requests.
        clock: monotonic seconds, as in the timelines.
        router_id: unique among several routers; empty for a single one.

    Attributes:
        forecaster: predicts routes with the present model.
    """

    def __init__(
        self,
        model: LatencyModel,
        errors: PredictionErrors,
        clock: Callable[[], float] = time.monotonic,
        router_id: str = "",
    ) -> None:
        self.model = model
        self._router_id = router_id
        self.ledger = WorkLedger()
        self.errors = errors
        self.habits = RequestHabits()
        self.forecaster = RouteForecaster(model, self.habits)
        self._clock = clock
        self._names = itertools.count(1)

    def begin(self, record: RequestRecord, decision: RouteDecision) -> Booking:
        """Counts the work of an attempt until :meth:`end`."""
        name = f"{self._router_id}/{record.request.request_id}#{next(self._names)}"
        num_known = len(record.request.prompt_token_ids) + len(record.token_ids)
        usual, most = self.habits.output_tokens.value, record.request.params.max_tokens - len(record.token_ids)
        cached = decision.cached_tokens
        booking = Booking(
            name,
            decision.prefill_id or "",
            decision.decode_id,
            decision.forecast,
            uncached_tokens=num_known - cached,
            cached_tokens=cached,
            expected_tokens=max(0, int(min(usual, most))),
            router_id=self._router_id,
            decodes=decision.prefill_id is None or record.request.params.max_tokens > 1,
        )
        self.ledger.begin_prompt(
            booking.computing_id, name, booking.uncached_tokens, cached, self._clock(), record.queue_priority
        )
        if booking.decodes:
            self.ledger.begin_decoding(
                booking.decode_id, name, num_known, record.request.slo.tpot_s, booking.expected_tokens
            )
        record.booking = booking
        if decision.forecast is not UNKNOWN_FORECAST and not record.token_ids:
            record.timeline.attributes.update(
                predicted_ttft_ms=round(decision.ttft_ms, 3), predicted_tpot_ms=round(decision.tpot_ms, 3)
            )
        return booking

    def tokens(self, record: RequestRecord, num_tokens: int) -> None:
        """Updates the ledger. The first tokens of an attempt mean that its prompt is computed."""
        booking = record.booking
        if booking is None:
            return
        if not booking.is_computed:
            booking.is_computed = True
            self.ledger.end_prompt(booking.computing_id, booking.name, self._clock())
        self.ledger.grow(booking.decode_id, booking.name, num_tokens)

    def end(self, booking: Booking) -> None:
        """Removes the work of an attempt. Idempotent."""
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
    """Bytes of KV in a worker's cache per byte on the wire. Predictions use bytes in the cache."""
    moved, spared = (attributes.get(name, 0) for name in ("kv_bytes", "kv_spared_bytes"))
    return 1 + float(spared) / float(moved) if moved else 1.0


def busy_s(parts: list[TransferPart]) -> float:
    """Seconds in which at least one part was in transit. The parts are in order of their start."""
    total, until_s = 0.0, float("-inf")
    for part in parts:
        total += max(0.0, part.acknowledged_s - max(part.started_s, until_s))
        until_s = max(until_s, part.acknowledged_s)
    return total


class RouteForecaster:
    """Predicts the latency of many routes for a request, and their effect on other requests."""

    def __init__(self, model: LatencyModel, habits: RequestHabits) -> None:
        self._model = model
        self._habits = habits

    def forecast(
        self,
        prefill_workers: Sequence[WorkerSnapshot],
        decode_workers: Sequence[WorkerSnapshot],
        prefill: Ints,
        decode: Ints,
        request: RoutingRequest,
    ) -> RouteForecasts:
        """Forecasts of routes, in the index form of :class:`~cluster.routing.routing_contracts.Candidates`."""
        local = prefill < 0
        computing = np.where(local, len(prefill_workers) + decode, prefill)
        contended = _contended(prefill_workers, decode_workers, prefill, decode)
        prompt = self._prompt_costs((*prefill_workers, *decode_workers), request)
        gaps = max(1.0, request.output_tokens - 1)
        exposed = self._exposed_ms(prefill_workers, decode_workers, prefill, decode, prompt, request)
        claims = ~local & (request.max_tokens > 1)
        handoff = np.where(claims, np.maximum(0.0, exposed + self._habits.claim_ms.value), 0.0)
        token, idle_token, stall = self._token_ms(decode_workers, prompt, request)
        busy = np.array([worker.batch for worker in decode_workers], float)[decode]
        work = np.where(local, prompt.work_ms[computing], 0.0)

        ttft_factor, ttft_spread = _calibration(self._model.ttft_calibration, contended, local)
        tpot_factor, tpot_spread = _calibration(self._model.tpot_calibration, contended, local)
        before_ms = request.elapsed_ms + self._habits.delivery_ms.value
        behind, alone = prompt.ms[computing] * ttft_factor, prompt.alone_ms[computing] * ttft_factor
        # Prompts that the decode worker still has to compute precede a local prompt, or delay the tokens of others.
        between = np.where(local, 0.0, stall[decode] / gaps)
        tpot = (token[decode] + between + handoff / gaps) * tpot_factor
        # The neighbours have answers of the usual length, whatever this request's max_tokens.
        usual_tokens = max(1.0, self._habits.output_tokens.value)
        neighbours = (token[decode] + between + 2 * work / usual_tokens) * tpot_factor
        sd = self._model.step_sds([worker.worker_id for worker in decode_workers])[decode]
        return RouteForecasts(
            ttft_ms=before_ms + behind,
            ttft_sd_ms=behind * np.sqrt(prompt.sd[computing] ** 2 + ttft_spread**2),
            wait_ms=np.maximum(0.0, behind - alone),
            tpot_ms=tpot,
            tpot_sd_ms=tpot * np.sqrt(sd**2 + tpot_spread**2),
            neighbour_tpot_ms=np.where(busy > 0, neighbours, 0.0),
            disturbance_ms=work * busy * tpot_factor,
            transfer_ms=handoff,
            exposed_ms=exposed,
            idle_ttft_ms=self._habits.delivery_ms.value + alone,
            idle_tpot_ms=(idle_token[decode] + handoff / gaps) * tpot_factor,
            ttft_factor=ttft_factor,
            tpot_factor=tpot_factor,
            contended=contended,
            before_ms=before_ms,
        )

    def _prompt_costs(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> PromptCosts:
        cached = np.array([worker.cached_tokens for worker in workers], float)
        cached = np.minimum(cached, request.num_prompt_tokens - 1)
        uncached = request.num_prompt_tokens - cached
        ids, queues = [worker.worker_id for worker in workers], [worker.queue for worker in workers]
        return self._model.prompt_costs(ids, uncached, cached, queues)

    def _token_ms(
        self, workers: Sequence[WorkerSnapshot], prompt: PromptCosts, request: RoutingRequest
    ) -> tuple[Floats, Floats, Floats]:
        """For each decode worker, ms between two tokens under load and idle, and ms of its waiting prompts."""
        ids = [worker.worker_id for worker in workers]
        own = request.num_prompt_tokens + request.output_tokens / 2
        loaded = self._model.token_ms(
            ids, [worker.batch + 1 for worker in workers], np.array([worker.context_tokens for worker in workers]) + own
        )
        idle = self._model.token_ms(ids, [1] * len(ids), np.full(len(ids), own))
        backlog = np.array([worker.backlog_tokens for worker in workers], float)
        return loaded, idle, backlog * prompt.ms_per_token[-len(ids) :]

    def _exposed_ms(
        self,
        prefill_workers: Sequence[WorkerSnapshot],
        decode_workers: Sequence[WorkerSnapshot],
        prefill: Ints,
        decode: Ints,
        prompt: PromptCosts,
        request: RoutingRequest,
    ) -> Floats:
        """For each hand-off, the ms after the prompt is computed. KV of earlier chunks was sent before."""
        if not prefill_workers or request.max_tokens == 1:
            return np.zeros(len(decode))
        fixed, per_byte = self._model.transfer_costs(
            [worker.worker_id for worker in prefill_workers], [worker.worker_id for worker in decode_workers]
        )
        held = np.array([worker.cached_tokens for worker in decode_workers], float)
        travelling = np.maximum(0.0, request.num_prompt_tokens - held)
        size = np.array([worker.kv_bytes_per_token for worker in prefill_workers], float)
        chunk = np.array([worker.chunk_tokens for worker in prefill_workers], float)
        last = np.minimum(travelling, chunk[:, None])
        num_prefill = len(prefill_workers)
        computing = prompt.alone_ms[:num_prefill] * (1 - 1 / np.maximum(1.0, prompt.num_chunks[:num_prefill]))
        per_token = per_byte * size[:, None]
        late = np.maximum(0.0, per_token * (travelling - last) - computing[:, None])
        return np.where(prefill < 0, 0.0, (fixed + per_token * last + late)[prefill, decode])


def _contended(
    prefill_workers: Sequence[WorkerSnapshot], decode_workers: Sequence[WorkerSnapshot], prefill: Ints, decode: Ints
) -> Bools:
    """``[num_routes]``: whether the two workers share a processor and one of them is busy."""
    if not prefill_workers:
        return np.zeros(len(decode), dtype=bool)
    numbers: dict[str, int] = {}

    def processor(worker: WorkerSnapshot) -> int:
        """A number shared by workers on the same processor; -1 for a worker with its own device."""
        return numbers.setdefault(worker.node, len(numbers)) if worker.device == "cpu" else -1

    places = np.array([processor(worker) for worker in prefill_workers])[prefill]
    others = np.array([processor(worker) for worker in decode_workers])[decode]
    busy = np.array([worker.backlog_tokens > 0 for worker in prefill_workers])[prefill]
    busy |= np.array([worker.batch > 0 for worker in decode_workers])[decode]
    return np.asarray((prefill >= 0) & (places >= 0) & (places == others) & busy)


def _calibration(calibration: RegimeCalibration, contended: Bools, local: Bools) -> tuple[Floats, Floats]:
    """(factor, spread), each ``[num_routes]``."""
    regimes = (
        calibration.of(contended=False),
        calibration.of(contended=True),
        calibration.of(contended=False, local=True),
    )
    index = np.where(local, 2, contended.astype(np.intp))
    return np.array([one.factor for one in regimes])[index], np.array([one.spread for one in regimes])[index]

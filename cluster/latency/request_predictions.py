"""Predicts every request when it is routed, and says afterwards how wrong that was."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.journal import Journal
from cluster.latency.calibration import SlidingMedian
from cluster.latency.error_metrics import TPOT, TTFT, PredictionErrors
from cluster.latency.ledger import WorkLedger
from cluster.latency_model import LatencyModel
from cluster.registry import WorkerInfo
from engine.request import FinishReason
from engine.timeline import Event, Timeline, TransferPart

_DELIVERY_MS = 2.0
_OUTPUT_TOKENS = 64.0
_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class _Prediction:
    """Of one sequence's present attempt; milliseconds. Those of the model alone are what it is calibrated with."""

    prefill_id: str
    decode_id: str
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    model_ttft_ms: float = 0.0
    model_tpot_ms: float = 0.0
    before_ms: float = 0.0
    """Of the time to the first token: what was over when the request was routed, and its way there and back."""
    transfer_ms: float = 0.0
    contended: bool = False


class RequestPredictions:
    """Keeps the ledger of work under way, predicts each request by it, and teaches the model what really happened.

    Args:
        errors: gets those of every finished request.
        clock: monotonic seconds; that of the timelines.
    """

    def __init__(
        self, model: LatencyModel, errors: PredictionErrors, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self.ledger = WorkLedger()
        self.errors = errors
        self._clock = clock
        self._delivery_ms = SlidingMedian(_DELIVERY_MS)
        self._claim_ms = SlidingMedian(0.0)
        self._output_tokens = SlidingMedian(_OUTPUT_TOKENS)
        self._cached_tokens = SlidingMedian(0.0)
        self._open: dict[str, _Prediction] = {}

    def routed(
        self, journal: Journal, prefill: WorkerInfo, decode: WorkerInfo, cached_tokens: int | None = None
    ) -> None:
        """Call it when both workers are chosen, before the request is sent.

        Args:
            cached_tokens: of the prompt, on the prefill worker; None: as many as usual.
        """
        name, num_prompt, now_s = journal.request.request_id, len(journal.request.prompt_token_ids), self._clock()
        self._close(name)
        expected = self._cached_tokens.value if cached_tokens is None else cached_tokens
        cached = int(min(expected, num_prompt - 1))
        prediction = self._open[name] = _Prediction(prefill.worker_id, decode.worker_id)
        prediction.contended = self._is_contended(prefill, decode)
        self._predict_ttft(prediction, journal.request.timeline, num_prompt - cached, cached, now_s)
        self._predict_tpot(prediction, journal, min(num_prompt, prefill.chunk_tokens) * prefill.kv_bytes_per_token)
        self.ledger.begin_prompt(prefill.worker_id, name, num_prompt - cached, cached, now_s)
        self.ledger.begin_decoding(decode.worker_id, name, lambda: num_prompt + len(journal.token_ids))
        journal.request.timeline.attributes.update(
            predicted_ttft_ms=round(prediction.ttft_ms, 3), predicted_tpot_ms=round(prediction.tpot_ms, 3)
        )

    def resumed(self, journal: Journal, decode: WorkerInfo) -> None:
        """A decode worker goes on alone; of that, nothing was predicted."""
        name, num_prompt = journal.request.request_id, len(journal.request.prompt_token_ids)
        self._close(name)
        self._open[name] = _Prediction("", decode.worker_id)
        self.ledger.begin_decoding(decode.worker_id, name, lambda: num_prompt + len(journal.token_ids))

    def first_token(self, journal: Journal) -> None:
        """The prefill worker is done with the prompt."""
        name = journal.request.request_id
        if (prediction := self._open.get(name)) is not None:
            self.ledger.end_prompt(prediction.prefill_id, name, self._clock())

    def ended(self, journal: Journal) -> None:
        """The request is over, however it went."""
        prediction = self._close(journal.request.request_id)
        if prediction is None or not prediction.prefill_id or journal.attempt != 1:
            return
        timeline = journal.request.timeline
        self._learn_transfer(prediction, timeline)
        if journal.finish_reason in _FINISHED:
            self._learn_request(prediction, journal, timeline)

    def _predict_ttft(
        self, prediction: _Prediction, timeline: Timeline, uncached: int, cached: int, now_s: float
    ) -> None:
        queue = self.ledger.queue(prediction.prefill_id, now_s)
        contended = prediction.contended
        calibrated = self.model.predict_ttft(prediction.prefill_id, uncached, cached, queue, contended=contended).ms
        over_ms = (now_s - timeline.events.get(Event.RECEIVED, now_s)) * 1e3
        prediction.before_ms = over_ms + self._delivery_ms.value
        prediction.model_ttft_ms = calibrated / self.model.ttft_calibration.of(contended=contended).factor
        prediction.ttft_ms = prediction.before_ms + calibrated

    def _predict_tpot(self, prediction: _Prediction, journal: Journal, last_chunk_bytes: int) -> None:
        batch, context = self.ledger.batch(prediction.decode_id)
        num_output = min(self._output_tokens.value, journal.request.params.max_tokens)
        own = len(journal.request.prompt_token_ids) + int(num_output / 2)
        link, contended = (prediction.prefill_id, prediction.decode_id), prediction.contended
        prediction.transfer_ms = self.model.transfer_ms(last_chunk_bytes, link).ms
        handoff_ms = max(0.0, prediction.transfer_ms + self._claim_ms.value)
        estimate = self.model.predict_tpot(
            prediction.decode_id, batch + 1, context + own, num_output, handoff_ms, contended=contended
        )
        prediction.tpot_ms = estimate.ms
        prediction.model_tpot_ms = estimate.ms / self.model.tpot_calibration.of(contended=contended).factor

    def _is_contended(self, prefill: WorkerInfo, decode: WorkerInfo) -> bool:
        """Whether the two would compute for others on the same processor at the same time."""
        shares = prefill.node == decode.node and prefill.device == decode.device == "cpu"
        return shares and (self.ledger.decodes(decode.worker_id) or self.ledger.computes_prompts(prefill.worker_id))

    def _close(self, name: str) -> _Prediction | None:
        prediction = self._open.pop(name, None)
        if prediction is not None:
            self.ledger.end_prompt(prediction.prefill_id, name, self._clock())
            self.ledger.end_decoding(prediction.decode_id, name)
        return prediction

    def _learn_transfer(self, prediction: _Prediction, timeline: Timeline) -> None:
        sent = [part for part in timeline.parts if part.acknowledged_s]
        if sent:
            link = (prediction.prefill_id, prediction.decode_id)
            self.model.observe_transfer(link, sum(part.num_bytes for part in sent), busy_s(sent) * 1e3)

    def _learn_request(self, prediction: _Prediction, journal: Journal, timeline: Timeline) -> None:
        num_output = len(journal.token_ids)
        self._output_tokens.observe(num_output)
        self._cached_tokens.observe(journal.num_cached_tokens)
        there = timeline.between_ms(Event.ROUTED, Event.PREFILL_QUEUED)
        back = timeline.between_ms(Event.FIRST_TOKEN_SAMPLED, Event.FIRST_TOKEN)
        if there is not None and back is not None:
            self._delivery_ms.observe(max(0.0, there) + max(0.0, back))
        handoff_ms = timeline.between_ms(Event.FIRST_TOKEN, Event.DECODE_STARTED)
        if handoff_ms is not None:
            self._claim_ms.observe(handoff_ms - prediction.transfer_ms)
        ttft_ms, tpot_ms = timeline.ttft_ms, timeline.tpot_ms(num_output)
        if ttft_ms is not None:
            self.errors.observe(TTFT, prediction.ttft_ms, ttft_ms)
            ttft_calibration = self.model.ttft_calibration.of(contended=prediction.contended)
            ttft_calibration.observe(prediction.model_ttft_ms, ttft_ms - prediction.before_ms)
        if tpot_ms is not None:
            self.errors.observe(TPOT, prediction.tpot_ms, tpot_ms)
            tpot_calibration = self.model.tpot_calibration.of(contended=prediction.contended)
            tpot_calibration.observe(prediction.model_tpot_ms, tpot_ms)


def busy_s(parts: list[TransferPart]) -> float:
    """Seconds in which at least one of the parts, which come in order, was on its way."""
    total, until_s = 0.0, float("-inf")
    for part in parts:
        total += max(0.0, part.acknowledged_s - max(part.started_s, until_s))
        until_s = max(until_s, part.acknowledged_s)
    return total

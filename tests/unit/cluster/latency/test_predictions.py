"""Predictions of real requests through a router: made, compared, published, and forgotten again."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from baton.core.errors import BatonError, InternalError, TransferError
from baton.core.outcomes import ENDED_BY
from baton.core.request import FinishReason
from baton.core.timeline import TransferPart
from baton.rpc.wire import worker_pb2
from cluster.cli.cli_view import render_status
from cluster.latency.calibration import TTFT, Calibration, ErrorWindow, PredictionErrors, SlidingMedian
from cluster.latency.latency_model import LatencyModel
from cluster.routing.request_predictions import busy_s
from tests.fake_workers import FakeCluster, decode_some, failing, handoff_failed, hang, prefill_then
from tests.waiting import until


class PredictingCluster(FakeCluster):
    @property
    def is_forgotten(self) -> bool:
        ledger = self.predictions.ledger
        return not (ledger._prompts or ledger._decoding)


async def test_a_request_is_predicted_when_routed_and_compared_when_finished() -> None:
    async with PredictingCluster() as cluster:
        await cluster.add_all(["p1", "d1"])
        request = cluster.request()
        await cluster.run(request)
        attributes = request.timeline.attributes
        assert attributes["predicted_ttft_ms"] > 0
        assert attributes["predicted_tpot_ms"] > 0
        summary = cluster.metrics.prediction_errors.summary()
        assert {kind: errors["requests"] for kind, errors in summary.items()} == {"ttft": 1, "tpot": 1}
        actual = request.timeline.ttft_ms
        assert summary["ttft"]["p50"] == pytest.approx(abs(attributes["predicted_ttft_ms"] - actual) / actual, abs=2e-3)
        assert cluster.is_forgotten


async def test_a_request_ended_by_a_stop_string_is_compared() -> None:
    """The gateway finds it and closes the sequence; what is learned of answers must not leave these out."""
    async with PredictingCluster() as cluster:
        await cluster.add_all(["p1", "d1"])
        request = cluster.request()
        num_tokens = 0
        async with aclosing(cluster.stream(request)) as chunks:
            async for chunk in chunks:
                num_tokens += len(chunk.token_ids)
                if num_tokens == 3:
                    request.timeline.attributes[ENDED_BY] = str(FinishReason.STOP)
                    break
        assert request.timeline.attributes["outcome"] == "stop"
        summary = cluster.metrics.prediction_errors.summary()
        assert {kind: errors["requests"] for kind, errors in summary.items()} == {"ttft": 1, "tpot": 1}
        assert cluster.predictions.habits.output_tokens.value == 3
        assert cluster.is_forgotten


async def test_running_work_delays_the_next_request() -> None:
    async with PredictingCluster() as cluster:
        prefill, _ = await cluster.add_all(["p1", "d1"])
        prefill.scripts.append(hang)
        long = cluster.request("long", prompt=tuple(range(3, 1500)))
        task = asyncio.create_task(cluster.run(long))
        await until(lambda: bool(prefill.requests))
        ledger = cluster.predictions.ledger
        assert ledger.queue("p1", 0.0).tokens == 1497
        assert ledger.batch("d1") == (1, 1497)
        short = cluster.request("short")
        await cluster.run(short)
        alone = cluster.predictions.model.prefill_ms("p1", 4).ms
        assert short.timeline.attributes["predicted_ttft_ms"] > 2 * alone
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert cluster.is_forgotten


@pytest.mark.parametrize("error", [InternalError("no"), TransferError("no")])
async def test_failed_attempts_are_forgotten_and_not_compared(error: BatonError) -> None:
    async with PredictingCluster() as cluster:
        prefill, _ = await cluster.add_all(["p1", "d1"])
        prefill.scripts.append(failing(error))
        await asyncio.gather(cluster.run(), return_exceptions=True)
        assert cluster.is_forgotten
        assert cluster.metrics.prediction_errors.summary()["ttft"]["requests"] == 0


async def test_a_resumed_request_counts_on_its_decode_worker_and_is_not_compared() -> None:
    async with PredictingCluster() as cluster:
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts.append(decode_some(2, TransferError("gone")))
        await cluster.run()
        assert cluster.is_forgotten
        assert cluster.metrics.prediction_errors.summary()["tpot"]["requests"] == 0


async def test_a_failed_handoff_is_not_a_link_sample() -> None:
    async with PredictingCluster() as cluster:
        prefill, _ = await cluster.add_all(["p1", "d1"])
        prefill.scripts.append(prefill_then(handoff_failed(TransferError("no"))))
        await cluster.run()
        assert cluster.predictions.model._links == {}


async def test_links_are_learned_in_bytes_of_kv_as_held_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions know what a prompt's KV takes in a cache, and not how it will be encoded on its way."""
    learned: list[int] = []
    monkeypatch.setattr(LatencyModel, "observe_transfer", lambda self, link, num_bytes, ms: learned.append(num_bytes))
    for spared in (0, 960):
        async with PredictingCluster() as cluster:
            prefill, _ = await cluster.add_all(["p1", "d1"])
            part = worker_pb2.TransferPart(num_bytes=1000, num_parts=1, started_s=1.0, sent_s=2.0, acknowledged_s=3.0)
            result = worker_pb2.HandoffResult(num_bytes=1000, num_spared_bytes=spared, num_parts=1, parts=[part])
            prefill.scripts.append(prefill_then(worker_pb2.PrefillEvent(handoff=result)))
            request = cluster.request()
            await cluster.run(request)
            assert request.timeline.attributes["kv_spared_bytes"] == spared
    assert learned == [1000, 1960]


def test_overlapping_parts_are_counted_once() -> None:
    parts = [TransferPart(1, 1, 0.0, 0.0, 2.0), TransferPart(1, 1, 1.0, 1.0, 3.0), TransferPart(1, 1, 5.0, 5.0, 6.0)]
    assert busy_s(parts) == 4.0
    assert busy_s([]) == 0.0


def test_errors_are_published_as_metrics() -> None:
    errors = PredictionErrors()
    registry = CollectorRegistry()
    registry.register(errors)

    def value(kind: str, quantile: str) -> float:
        labels = {"kind": kind, "quantile": quantile}
        return registry.get_sample_value("baton_prediction_error_ratio", labels) or 0.0

    assert math.isnan(value("ttft", "0.5"))
    for predicted_ms in (100.0, 110.0, 130.0):
        errors.observe(TTFT, predicted_ms, 100.0)
    assert value("ttft", "0.5") == pytest.approx(0.1)
    assert value("ttft", "0.95") == pytest.approx(0.3)
    assert math.isnan(value("tpot", "0.95"))


def test_status_reports_errors_in_one_line() -> None:
    requests = {"in_flight": 0, "finished": 3, "cancelled": 0, "rejected": 0, "failed": 0}
    errors = PredictionErrors()
    errors.observe(TTFT, 93.0, 100.0)
    status = {"model": "m", "uptime_s": 1, "requests": requests, "pools": {}}
    told = render_status({**status, "predictions": errors.summary()}, "http://here", 80)
    texts = [str(part) for part in told.renderables]
    assert any("prediction errors: TTFT ±7% (p95 7%)" in text for text in texts)
    assert not any("TPOT" in text for text in texts)
    render_status(status, "http://here", 80)  # of a router that says nothing of it


def test_calibration_finds_a_factor_and_survives_any_value() -> None:
    calibration = Calibration()
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        calibration.observe(bad, 100.0)
        calibration.observe(100.0, bad)
    assert calibration.factor == 1.0
    for _ in range(40):
        calibration.observe(100.0, 150.0)
    calibration.observe(100.0, 1e9)
    assert calibration.factor == pytest.approx(1.5, rel=0.06)
    for _ in range(100):
        calibration.observe(1.0, 1e9)
    assert calibration.factor <= 4.0


def test_an_error_window_keeps_the_latest_valid_errors() -> None:
    errors = ErrorWindow(window=4)
    assert errors.quantile(0.5) is None
    for predicted in (1.0, 50.0, 90.0, 100.0, 110.0):
        errors.observe(predicted, 100.0)
    errors.observe(float("nan"), 100.0)
    errors.observe(100.0, 0.0)
    assert len(errors) == 4
    assert errors.quantile(0.0) == 0.0
    assert errors.quantile(1.0) == 0.5
    median = SlidingMedian(7.0)
    assert median.value == 7.0
    median.observe(float("inf"))
    median.observe(3.0)
    assert median.value == 3.0

"""The outcomes of sequences in metrics and logs."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

import pytest

from cluster.gateway.output_processor import OutputDelta, OutputProcessor
from cluster.requests.generation import TokenChunk
from tests.unit.cluster.fakes import MODEL
from tests.unit.cluster.instant_cluster import TOKENIZER, InstantCluster, call_app


@pytest.fixture
async def cluster() -> AsyncIterator[InstantCluster]:
    running = InstantCluster()
    yield running
    await running.stop()


async def post(cluster: InstantCluster, **parameters: object) -> int:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, **parameters}
    return await call_app(await cluster.start(), "POST", "/v1/completions", json.dumps(body).encode())


def outcomes(cluster: InstantCluster) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for family in cluster.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "baton_requests_total" and sample.value
    }


async def test_a_stop_string_is_a_finish_and_not_a_cancellation(cluster: InstantCluster) -> None:
    """The gateway finds it and closes the sequence, as it would if the client had gone away."""
    word = TOKENIZER.decode([40])
    assert await post(cluster, stop=[word]) == 200
    assert outcomes(cluster) == {"stop": 1}
    assert cluster.metrics.registry.get_sample_value("baton_request_seconds_count") == 1


async def test_a_sequence_ended_by_a_sibling_is_not_cancelled(
    cluster: InstantCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is there, and gets an error: that counts for all sequences that had begun."""
    process = OutputProcessor.process

    def break_once(self: OutputProcessor, chunk: TokenChunk) -> OutputDelta:
        monkeypatch.setattr(OutputProcessor, "process", process)
        raise RuntimeError("this detokenizer is broken")

    monkeypatch.setattr(OutputProcessor, "process", break_once)
    assert await post(cluster, n=4) == 500
    assert set(outcomes(cluster)) <= {"internal_error", "length"}
    assert outcomes(cluster)["internal_error"] >= 1


async def test_the_end_of_a_sequence_is_logged_in_one_line(
    cluster: InstantCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cluster.dispatch.router"):
        assert await post(cluster) == 200
    [line] = [vars(record) for record in caplog.records if record.name == "cluster.dispatch.router"]
    assert (line["levelno"], line["outcome"], line["output_tokens"]) == (logging.INFO, "length", 4)
    assert line["duration_ms"] >= line["ttft_ms"] >= 0
    assert line["request_id"].startswith("cmpl-")


async def test_internal_failures_are_warnings(cluster: InstantCluster, caplog: pytest.LogCaptureFixture) -> None:
    app = await cluster.start()
    for worker in cluster.registry.pool("prefill"):
        cluster.registry.drain(worker.info.worker_id)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4}).encode()
    assert await call_app(app, "POST", "/v1/completions", body) == 503
    [line] = [vars(record) for record in caplog.records if record.name == "cluster.dispatch.router"]
    assert (line["levelno"], line["outcome"]) == (logging.WARNING, "no_worker_available")

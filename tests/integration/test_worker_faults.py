"""Unexpected errors on a worker: the text stays in the worker's log, and the client gets an id to find it there."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from baton.core.errors import BatonError, InternalError, WorkerLostError
from baton.core.steps import StepProgress
from tests.engine_runs import greedy
from tests.integration.worker_pair import Runners, WorkerPair, pair_config, worker_pair
from tests.tiny_models import random_prompts, tiny_model

[PROMPT] = random_prompts((20,))
SECRET = "text of a prompt"


@pytest.fixture(scope="module")
def runners() -> Runners:
    return Runners.of(tiny_model("llama"))


def break_prefill(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.prefill.engine, "check_request", fail)


def break_decode(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.decode.engine, "check_request", fail)


def break_sender(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.prefill.role._transport, "open", fail)


def break_receiver(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.decode.role._importer, "_try_reserve", fail)


def fail(*_: Any) -> Any:
    raise ValueError(SECRET)


@pytest.mark.parametrize("break_it", [break_prefill, break_decode, break_sender, break_receiver])
async def test_faults_are_logged_on_the_worker_and_travel_without_their_text(
    runners: Runners, break_it: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = pair_config(kv_transfer={"claim_timeout_s": 2.0})  # KV that a broken decode worker never claims
    async with worker_pair(runners, config) as pair:
        with monkeypatch.context() as patch:
            break_it(pair, patch)
            with pytest.raises(BatonError) as raised:
                await pair.generate(PROMPT, greedy(8))
        assert isinstance(raised.value, InternalError)
        assert SECRET not in raised.value.message
        assert "ValueError" not in raised.value.message
        assert "request id request-1." in raised.value.message
        faults = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert faults
        for record in faults:
            assert vars(record)["request_id"] == "request-1"
            assert record.exc_info is not None
            assert str(record.exc_info[1]) == SECRET
        await pair.settle()
        assert len((await pair.generate(PROMPT, greedy(8))).token_ids) == 8


async def test_both_roles_report_their_progress_and_compute_a_token_when_they_are_probed(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        for worker in (pair.prefill, pair.decode):
            assert await worker.client.ping(10.0) == StepProgress(0)
            await worker.client.probe(10.0)
            assert await worker.client.ping(10.0) == StepProgress(1)


async def test_a_worker_whose_engine_has_ended_answers_no_ping(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is there until it is replaced, and would fail every request."""
    async with worker_pair(runners) as pair:
        for worker in (pair.prefill, pair.decode):
            monkeypatch.setattr(worker.engine.scheduler, "schedule", fail)
            with pytest.raises(WorkerLostError):
                await worker.client.probe(10.0)
            with pytest.raises(WorkerLostError, match="this worker's engine failed"):
                await worker.client.ping(10.0)


async def test_a_probe_fails_with_the_engine(
    runners: Runners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker_pair(runners) as pair:
        monkeypatch.setattr(pair.decode.engine.runner, "forward", fail)
        with pytest.raises(InternalError, match="the engine failed while it computed this request"):
            await pair.decode.client.probe(10.0)

"""The recorder of the traffic's shape, and the trace that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.bench.traces import MOONCAKE_BLOCK_TOKENS, read_trace
from baton.core.request import SamplingParams
from baton.core.timeline import Event, Timeline
from cluster.requests.generation import GenerationRequest
from cluster.requests.request_record import RequestRecord
from cluster.telemetry.traffic_recorder import BLOCK_TOKENS, TrafficRecorder, mooncake_requests

SYSTEM = tuple(range(1000, 2024))
"""Two blocks."""


def record(prompt: tuple[int, ...], num_output: int = 3, *, at_s: float = 10.0, salt: str = "") -> RequestRecord:
    timeline = Timeline("one", {Event.RECEIVED: at_s})
    request = GenerationRequest("one", prompt, SamplingParams(), timeline, cache_salt=salt)
    found = RequestRecord(request, 60.0, lambda: 50.0)
    found.token_ids = [7] * num_output
    return found


def trace_of(*records: RequestRecord, capacity: int = 10, key: bytes = b"k") -> list[dict[str, object]]:
    recorder = TrafficRecorder(capacity, key, clock=lambda: 50.0, calendar=lambda: 1e9)
    for each in records:
        recorder.ended(each)
    return mooncake_requests(recorder.recorded())


def test_shared_beginnings_have_the_same_ids():
    first, second, other = trace_of(
        record((*SYSTEM, 1, 2, 3)), record((*SYSTEM, 9), at_s=12.5), record((5, 6), at_s=13.0)
    )
    assert first == {"timestamp": 0, "input_length": 1027, "output_length": 3, "hash_ids": [0, 1, 2]}
    assert second == {"timestamp": 2500, "input_length": 1025, "output_length": 3, "hash_ids": [0, 1, 3]}
    assert other["hash_ids"] == [4]


def test_equal_blocks_after_different_ones_are_different():
    first, second = trace_of(record((1, *SYSTEM[:511], *SYSTEM[:512])), record((2, *SYSTEM[:511], *SYSTEM[:512])))
    assert not set(first["hash_ids"]) & set(second["hash_ids"])


def test_clients_that_share_no_cache_share_no_ids():
    first, second = trace_of(record(SYSTEM, salt="a"), record(SYSTEM, salt="b"))
    assert not set(first["hash_ids"]) & set(second["hash_ids"])


def test_lines_are_in_order_of_arrival():
    trace = trace_of(record((1,), 9, at_s=20.0), record((1, 2), 8, at_s=10.0))
    assert [(line["timestamp"], line["output_length"]) for line in trace] == [(0, 8), (10_000, 9)]


def test_the_newest_are_kept_and_only_sequences_with_tokens():
    trace = trace_of(record((1,)), record((1, 2)), record((1, 2, 3)), record((1,), 0), capacity=2)
    assert [line["input_length"] for line in trace] == [2, 3]


def test_nothing_recorded_is_an_empty_trace():
    assert trace_of() == []


def test_the_load_tool_reads_the_trace(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    lines = trace_of(record((*SYSTEM, 1)), record((*SYSTEM, 2), at_s=11.0))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first, second = read_trace(file)
    assert BLOCK_TOKENS == MOONCAKE_BLOCK_TOKENS
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (1025, 3, (0, 1, 2))
    assert (second.at_s, second.hash_ids) == (pytest.approx(1.0), (0, 1, 3))

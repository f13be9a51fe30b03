"""The stages of a timeline add up to the latency that the client measures, under concurrent requests."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import SMALL_CHUNKS
from tests.running_cluster import MODEL, RunningCluster

SETTINGS = SMALL_CHUNKS
NUM_REQUESTS = 100
# The sum may differ by 5 ms or 1 %.
TOLERANCE_MS = 5.0
TOLERANCE_SHARE = 0.01
LATE_CLIENT_SHARE = 0.05
"""Of the answers, which the client may read late: it has the machine not to itself, and 100 of them to wait for."""


@dataclass(frozen=True)
class Answer:
    """What a client saw. Milliseconds from before its first byte went out."""

    request_id: str
    first_byte_ms: float
    last_byte_ms: float
    body: bytes


async def ask(endpoint: str, number: int, body: dict[str, Any], gate: asyncio.Event) -> Answer:
    """One request over a connection of its own. No HTTP library, so that the client's own time stays small."""
    url = urlsplit(endpoint)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    content = json.dumps({"model": MODEL, **body}).encode()
    request_id = f"sum-{number}"
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    await gate.wait()
    started_s = time.perf_counter()
    writer.write(head.encode() + content)
    received = bytearray(await reader.read(65536))
    first_s = last_s = time.perf_counter()
    while data := await reader.read(65536):
        received += data
        last_s = time.perf_counter()
    writer.close()
    return Answer(request_id, (first_s - started_s) * 1e3, (last_s - started_s) * 1e3, bytes(received))


def bodies() -> list[dict[str, Any]]:
    """Short prompts, and some long ones (one is number 39); every other request streams."""
    return [
        {
            "prompt": f"{number} " + "and so on " * (number % (40 if number % 8 == 7 else 8)),
            "max_tokens": 4 + number % 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": number % 4 != 3,
        }
        for number in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def answers(cluster: RunningCluster) -> list[Answer]:
    async def run() -> list[Answer]:
        gate = asyncio.Event()
        tasks = [asyncio.create_task(ask(cluster.endpoint, n, body, gate)) for n, body in enumerate(bodies())]
        await asyncio.sleep(0.5)  # every connection is there
        gate.set()
        return await asyncio.gather(*tasks)

    cluster.complete("A first one, after which nothing is new to anybody.", max_tokens=4)
    found = asyncio.run(run())
    cluster.assert_nothing_leaked()
    return found


def test_stages_add_up_to_the_latency_of_the_client(cluster: RunningCluster, answers: list[Answer]) -> None:
    off = []
    for answer in answers:
        assert answer.body.startswith(b"HTTP/1.1 200"), answer.body[:200]
        timeline = cluster.get(f"/v1/requests/{answer.request_id}/timeline")
        total_ms = sum(stage["duration_ms"] for stage in timeline["stages"])
        assert total_ms == pytest.approx(timeline["total_ms"], abs=0.1)
        sent_ms = next(event["at_ms"] for event in timeline["events"] if event["name"] == "sent")
        assert total_ms == pytest.approx(sent_ms, abs=0.1)
        difference_ms = answer.last_byte_ms - total_ms
        off.append((round(abs(difference_ms) / answer.last_byte_ms, 4), round(difference_ms, 2), answer.request_id))
    wrong = [entry for entry in off if abs(entry[1]) > TOLERANCE_MS and entry[0] > TOLERANCE_SHARE]
    assert len(wrong) <= LATE_CLIENT_SHARE * NUM_REQUESTS, sorted(off, reverse=True)[:10]


def test_every_stage_is_present_and_in_order(cluster: RunningCluster, answers: list[Answer]) -> None:
    for answer in answers[:: NUM_REQUESTS // 10]:
        timeline = cluster.get(f"/v1/requests/{answer.request_id}/timeline")
        names = [stage["name"] for stage in timeline["stages"]]
        assert {"accept", "tokenize", "to_prefill", "prefill", "first_token_delivery", "decode", "send"} <= set(names)
        starts = [stage["start_ms"] for stage in timeline["stages"]]
        assert starts == sorted(starts)
        assert starts[0] == 0


def test_all_rounds_chunks_and_parts_are_listed(cluster: RunningCluster, answers: list[Answer]) -> None:
    timeline = cluster.get("/v1/requests/sum-39/timeline")
    attributes = timeline["attributes"]
    chunks, rounds = timeline["prefill_steps"]["kept"], timeline["decode_steps"]["kept"]
    assert (
        sum(chunk["computed_tokens"] for chunk in chunks) == attributes["prompt_tokens"] - attributes["cached_tokens"]
    )
    assert len(chunks) > 1, "the prompt is longer than prefill.chunk_tokens"
    assert 1 + sum(entry["tokens"] for entry in rounds) == attributes["output_tokens"] == 4
    assert sum(entry["drafted_tokens"] for entry in rounds) == attributes["drafted_tokens"]
    assert all(entry["batch_sequences"] >= 1 and entry["duration_ms"] > 0 for entry in rounds)
    parts = timeline["transfer_parts"]
    assert sum(part["bytes"] for part in parts) == attributes["kv_bytes"]
    assert 0 < attributes["kv_shared_bytes"] <= attributes["kv_bytes"], "workers of one host share memory"
    assert all(part["start_ms"] <= part["sent_ms"] for part in parts)
    assert all(part["start_ms"] <= part["acknowledged_ms"] for part in parts)


def test_blame_names_the_largest_stage(cluster: RunningCluster, answers: list[Answer]) -> None:
    for answer in answers[:: NUM_REQUESTS // 10]:
        timeline = cluster.get(f"/v1/requests/{answer.request_id}/timeline")
        for key in ("time_to_first_token", "slowest_gap"):
            blame = timeline[key]
            largest = max(blame["stages"], key=lambda stage: stage["duration_ms"])
            assert (blame["stage"], blame["stage_ms"]) == (largest["name"], largest["duration_ms"])
            assert sum(stage["duration_ms"] for stage in blame["stages"]) == pytest.approx(blame["duration_ms"], abs=1)
            assert blame["sentence"].endswith(".")
            assert blame["hint"]


def test_the_slowest_request_is_listed_first(cluster: RunningCluster, answers: list[Answer]) -> None:
    listed = cluster.get("/v1/requests?order=slowest&limit=1000")["data"]
    times = [entry["total_ms"] for entry in listed]
    assert len(times) >= NUM_REQUESTS
    assert times == sorted(times, reverse=True)


def test_every_choice_has_its_own_timeline(cluster: RunningCluster) -> None:
    body = cluster.complete("Tell me about rivers.", max_tokens=6, n=3, temperature=0.9, seed=1, ignore_eos=True)
    cluster.assert_nothing_leaked()
    shown = cluster.get(f"/v1/requests/{body['id']}/timeline")
    assert len(shown["sequences"]) == 3
    totals = [sum(stage["duration_ms"] for stage in sequence["stages"]) for sequence in shown["sequences"]]
    assert totals == pytest.approx([totals[0]] * 3, abs=0.1), "all are sent together"
    assert cluster.get(f"/v1/requests/{body['id']}-1/timeline")["request_id"] == f"{body['id']}-1"

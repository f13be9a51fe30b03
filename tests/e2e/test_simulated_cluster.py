"""Simulated workers behind the real gateway and router: several to a process, text over HTTP, lost processes."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time

import httpx
import psutil
import ray
from openai import APIConnectionError, InternalServerError, OpenAI

from cluster.jobs.line_attempts import MAX_LOST
from tests.job_services import CHAT_URL, jsonl, line
from tests.jobs_under_kills import ROUTER, WORKERS, check, kill_one, submit, wait
from tests.running_cluster import MODEL, RunningCluster, wait_for

SETTINGS = {
    "simulation": {"profile": "h100-8b", "workers_per_process": 5},
    "prefill": {"workers": 3, "chunk_tokens": 2048},
    "decode": {"workers": 5, "chunk_tokens": 2048},
    "routing": {"local_prefill": "never"},
}


def test_simulated_workers_share_processes(cluster: RunningCluster) -> None:
    workers = cluster.workers()
    assert len(workers) == 8
    assert len({worker["address"] for worker in workers}) == 8
    assert len({worker["pid"] for worker in workers}) == 2
    assert {worker["device"] for worker in workers} == {"simulated H100 SXM"}


def test_a_client_receives_text(cluster: RunningCluster) -> None:
    client = OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=200, seed=1, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert len(text.split()) > 5


def test_equal_requests_get_equal_answers(cluster: RunningCluster) -> None:
    answers = [cluster.complete("Three colours are", max_tokens=24, seed=3, ignore_eos=True) for _ in range(3)]
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1
    assert answers[0]["usage"]["completion_tokens"] == 24
    assert answers[0]["choices"][0]["finish_reason"] == "length"


def test_many_concurrent_requests_use_both_pools(cluster: RunningCluster) -> None:
    before = cluster.metric("baton_kv_transfer_tokens_total")

    async def ask(client: httpx.AsyncClient, index: int) -> int:
        body = {"model": MODEL, "prompt": f"Number {index}: " + "word " * 300, "max_tokens": 32, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["completion_tokens"]
        return tokens

    async def all_of_them() -> list[int]:
        async with httpx.AsyncClient(base_url=cluster.endpoint, timeout=60) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(64)))

    assert asyncio.run(all_of_them()) == [32] * 64
    assert cluster.metric("baton_kv_transfer_tokens_total") > before
    cluster.assert_nothing_leaked()


def test_ray_keeps_no_record_of_calls(cluster: RunningCluster) -> None:
    cluster.workers()  # the router calls the controller
    assert ray.timeline() == []


def test_scale_waits_for_the_new_sizes(cluster: RunningCluster) -> None:
    def scale(*sizes: str) -> str:
        command = [sys.executable, "-m", "cluster.cli.cli", "scale", *sizes, "--wait", "--endpoint", cluster.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == len(set(lines)), "the same progress was reported twice"
        return done.stdout

    staying = {worker["id"] for worker in cluster.workers("prefill")}
    assert scale("prefill=3", "decode=6") == "prefill: 3, decode: 6\n"
    assert [worker["state"] for worker in cluster.workers()] == ["ready"] * 9
    assert scale("decode=5") == "prefill: 3, decode: 5\n"
    assert len(cluster.workers("decode")) == 5
    assert {worker["id"] for worker in cluster.workers("prefill")} == staying


def test_the_timeline_shows_steps_and_the_handoff(cluster: RunningCluster) -> None:
    answer = cluster.complete("word " * 100, max_tokens=20, ignore_eos=True)
    cluster.assert_nothing_leaked()
    timeline = cluster.get(f"/v1/requests/{answer['id']}/timeline")
    names = {event["name"] for event in timeline["events"]}
    assert {"prefill_started", "first_token", "transfer_started", "kv_committed", "decode_started"} <= names
    assert timeline["decode_steps"]


def test_a_lost_process_is_replaced(cluster: RunningCluster) -> None:
    before = {worker["id"]: worker["pid"] for worker in cluster.workers()}
    lost = next(iter(before.values()))
    psutil.Process(lost).kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        workers = [worker for worker in cluster.workers() if worker["state"] == "ready"]
        if len(workers) == 8 and lost not in {worker["pid"] for worker in workers}:
            break
        time.sleep(0.2)
    else:
        raise AssertionError(f"the workers of {lost} were not replaced: {cluster.workers()}")
    stayed = {worker["id"] for worker in workers} & set(before)
    assert stayed == {worker_id for worker_id, pid in before.items() if pid != lost}
    assert cluster.complete("Hello", max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_each_line_of_a_job_has_one_result_although_router_and_workers_are_killed(cluster: RunningCluster) -> None:
    """``python -m tests.jobs_under_kills`` does the same at full size, and restarts the cluster."""
    lines, draw = 150, random.Random(1)
    with OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=20) as client:
        batch = submit(client, lines, tokens=300)
        for kind in (WORKERS, ROUTER, WORKERS):
            batch = wait(client, batch, 2.0)
            assert batch.status in ("validating", "in_progress")
            assert kill_one(lambda: psutil.Process().children(recursive=True), kind, draw)
        batch = wait(client, batch, 120.0)
        assert check(client, batch, lines) == (lines, [])


def test_a_line_that_loses_router_after_router_ends_with_an_error(cluster: RunningCluster) -> None:
    def body(name: str, tokens: int) -> dict[str, object]:
        messages = [{"role": "user", "content": name}]
        return line(name, messages=messages, max_tokens=tokens, temperature=0, ignore_eos=True)

    draw = random.Random(1)
    with OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=20) as client:
        content = jsonl(body("short", 20), body("long", 7000))  # more than a minute
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT_URL, completion_window="24h")

        def only_long_runs() -> bool:
            try:
                counts = client.batches.retrieve(batch.id).request_counts
                in_flight = cluster.get("/admin/status")["requests"]["in_flight"]
            except (APIConnectionError, InternalServerError, httpx.HTTPError):  # there is no router yet
                return False
            return counts is not None and counts.completed == 1 and in_flight == 1

        for _ in range(MAX_LOST):
            wait_for(only_long_runs, "the long line")
            assert kill_one(lambda: psutil.Process().children(recursive=True), ROUTER, draw)
        batch = wait(client, batch, 120.0)
        assert batch.status == "completed"
        files = (str(batch.output_file_id), str(batch.error_file_id))
        [succeeded, failed] = [json.loads(client.files.content(file).text) for file in files]
    assert (succeeded["custom_id"], succeeded["response"]["status_code"]) == ("short", 200)
    assert (failed["custom_id"], failed["error"]["code"]) == ("long", "router_lost")

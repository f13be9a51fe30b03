"""Metrics and logs of a real cluster: the dashboard and the rules find their series; logs have ids, no prompts."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config.config import BatonConfig
from tests.e2e.conftest import start
from tests.grafana import Series, dashboard_expressions, problems, rule_expressions
from tests.running_cluster import MODEL, RunningCluster

SETTINGS = {
    "router": {"port": 0, "request_timeout_s": 15.0},
    "log": {"level": "debug", "json": True},
    "slo": {"classes": {"impossible": {"ttft": "1ms", "tpot": "1ms"}}},
    "routing": {"local_prefill": "never"},
}
MARKER = "xylophone-quagmire"
"""A marker in every prompt and nowhere else."""
SETTLE_S = 60.0


@dataclass(frozen=True)
class Observed:
    """A cluster and the folder of its logs."""

    cluster: RunningCluster
    log_folder: Path

    def post(self, path: str, body: dict[str, Any], request_id: str = "", **headers: str) -> httpx.Response:
        if request_id:
            headers["X-Request-Id"] = request_id
        return httpx.post(self.cluster.endpoint + path, json=body, headers=headers, timeout=60)

    def get(self, path: str) -> Any:
        return httpx.get(self.cluster.endpoint + path, timeout=30).json()

    def page(self) -> str:
        return httpx.get(self.cluster.endpoint + "/metrics", timeout=30).text

    def log_texts(self) -> list[str]:
        """What any process wrote, Ray's own and those of clusters before on the same Ray included, by file."""
        files = [file for file in sorted(self.log_folder.rglob("*")) if file.is_file()]
        return [file.read_text(encoding="utf-8", errors="replace") for file in files]

    def lines(self, request_id: str) -> list[dict[str, Any]]:
        """All lines about a request."""
        # What stands behind the last end of a line is still being written.
        return [
            json.loads(line)
            for text in self.log_texts()
            for line in text.split("\n")[:-1]
            if line.startswith("{") and request_id in line
        ]


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    reports: list[str] = []
    cluster = start(BatonConfig.from_dict(SETTINGS), reports.append)
    try:
        [folder] = [line.rsplit(" ", 1)[1] for line in reports if "log to" in line]
        yield Observed(RunningCluster(cluster.endpoint), Path(folder))
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def traffic(observed: Observed) -> Observed:
    """The cluster after requests of several kinds."""
    good = {"model": MODEL, "prompt": f"{MARKER} once upon a time", "max_tokens": 24, "temperature": 0}
    repeated = {**good, "prompt": "one two three four one two three four one two three", "max_tokens": 32}
    for body in (good, good, {**good, "stream": True}, {**good, "n": 2}, {**good, "stop": [" "]}):
        assert observed.post("/v1/completions", body).status_code == 200
    for method in ("ngram", "eagle3"):
        body = {**repeated, "speculation": {"method": method}}
        assert observed.post("/v1/completions", body).status_code == 200
    assert observed.post("/v1/completions", {**good, "model": "made-up"}).status_code == 404
    assert observed.post("/v1/completions", {**good, "max_tokens": -1}).status_code == 400
    return observed


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """A condition that fails, for a metric that is not there, does not hold yet."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        with contextlib.suppress(AssertionError):
            if condition():
                return
        assert time.monotonic() < deadline, f"{what} did not happen within {SETTLE_S:g} s"
        time.sleep(0.1)


def total(page: str, name: str, *labels: str) -> float:
    """Sum over the series of ``name`` that have all of ``labels``, written as in the page."""
    lines = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
    assert lines, f"/metrics has no {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def sent_bytes(page: str) -> float:
    return total(page, "baton_worker_kv_sent_bytes_total")


def received_bytes(page: str) -> float:
    return total(page, "baton_worker_kv_received_bytes_total", 'pool="decode"')


def _all_reported(page: str) -> bool:
    return 0 < received_bytes(page) <= sent_bytes(page)


def test_every_metric_in_the_dashboard_and_the_rules_exists(traffic: Observed) -> None:
    series = Series.of_page(traffic.page())
    assert problems(dashboard_expressions(), series) == []
    assert problems(rule_expressions(), series) == []


def test_metrics_count_what_happened(traffic: Observed) -> None:
    traffic.cluster.assert_nothing_leaked()
    # Each worker reports what it counts in its own time, so the last that was sent may be heard of after its arrival.
    wait_for(lambda: _all_reported(traffic.page()), "the prefill worker's last report")
    page = traffic.page()
    assert total(page, "baton_requests_total", 'outcome="length"') >= 6
    assert total(page, "baton_requests_total", 'outcome="stop"') >= 1  # ended by a stop string
    assert total(page, "baton_requests_total", 'outcome="cancelled"') == 0
    assert total(page, "baton_rejections_total", 'reason="model_not_found"') == 1
    assert total(page, "baton_rejections_total", 'reason="invalid_request"') == 1
    num_sequences = total(page, "baton_requests_total")
    assert total(page, "baton_time_to_first_token_seconds_count") == num_sequences
    assert total(page, "baton_inter_token_latency_seconds_count") > num_sequences
    for name in ("baton_queue_seconds", "baton_prefill_seconds", "baton_decode_seconds", "baton_request_seconds"):
        assert total(page, f"{name}_count") == num_sequences, name
    moved = total(page, "baton_kv_transfer_bytes_total")
    sent = sent_bytes(page)
    # A stop string ends one of eight requests at its first token, before the router learns of its hand-off.
    assert total(page, "baton_kv_transfers_total", 'outcome="ok"') in (7, 8)
    assert 0 < moved <= received_bytes(page) <= sent
    assert sent - moved <= sent / 6
    assert total(page, "baton_worker_prefill_tokens_total", 'pool="prefill"') > 0
    assert total(page, "baton_local_prefills_total") == 0
    drafted = total(page, "baton_worker_drafted_tokens_total", 'method="ngram"')
    assert drafted >= total(page, "baton_worker_accepted_tokens_total", 'method="ngram"') > 0


def test_met_and_missed_slos_show_in_metrics_status_and_logs(traffic: Observed) -> None:
    kept, broken = f"kept-{uuid.uuid4().hex[:12]}", f"broken-{uuid.uuid4().hex[:12]}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": MARKER}], "max_tokens": 8, "ignore_eos": True}
    response = traffic.post("/v1/chat/completions", {**body, "service_tier": "flex"}, kept)
    assert (response.status_code, response.json()["service_tier"]) == (200, "flex")
    headers = {"X-Baton-SLO-Class": "impossible"}
    assert traffic.post("/v1/chat/completions", body, broken, **headers).status_code == 200

    page = traffic.page()
    for name, result, attainment in (("batch", "met", 1.0), ("impossible", "missed_both", 0.0)):
        slo_class = f'slo_class="{name}"'
        assert total(page, "baton_slo_requests_total", slo_class) == 1
        assert total(page, "baton_slo_requests_total", slo_class, f'result="{result}"') == 1
        assert total(page, "baton_slo_attainment_ratio", slo_class, 'window="1h"') == attainment
        assert total(page, "baton_time_to_first_token_seconds_count", slo_class) == 1
        window = traffic.get("/admin/status")["slo"][name]["windows"]["1h"]
        assert (window["requests"], window["attainment"]) == (1, attainment)
    attributes = traffic.get(f"/v1/requests/{broken}/timeline")["attributes"]
    assert (attributes["slo_class"], attributes["slo_result"]) == ("impossible", "missed_both")
    assert attributes["slo_ttft_margin_ms"] < 0 > attributes["slo_tpot_margin_ms"]
    for request_id, name, met in ((kept, "batch", True), (broken, "impossible", False)):
        wait_for(
            lambda request_id=request_id: any(line["message"] == "answered" for line in traffic.lines(request_id)),
            f"the line of {request_id} in the access log",
        )
        [line] = [line for line in traffic.lines(request_id) if line["message"] == "answered"]
        assert (line["slo_class"], line["slo_met"]) == (name, met)


def test_scaling_shows_and_removed_workers_have_no_series(traffic: Observed) -> None:
    before = total(traffic.page(), "baton_scale_events_total", 'pool="decode"', 'direction="up"')
    assert traffic.post("/admin/scale", {"decode": 2}).status_code == 200
    ready = ('pool="decode"', 'state="ready"')
    wait_for(lambda: total(traffic.page(), "baton_workers", *ready) == 2, "the second worker")
    wait_for(lambda: total(traffic.page(), "baton_worker_up", 'pool="decode"') == 2, "an answer of the second worker")
    page = traffic.page()
    assert total(page, "baton_scale_events_total", 'pool="decode"', 'direction="up"') == before + 1
    assert total(page, "baton_workers_target", 'pool="decode"') == 2
    assert 'worker="decode-2"' in page
    assert traffic.post("/admin/scale", {"decode": 1}).status_code == 200
    wait_for(lambda: 'worker="decode-2"' not in traffic.page(), "the end of its series")
    assert total(traffic.page(), "baton_scale_events_total", 'pool="decode"', 'direction="down"') >= 1
    assert total(traffic.page(), "baton_worker_failures_total") == 0


def test_scrapes_under_load_are_complete_and_counters_never_decrease(observed: Observed) -> None:
    body = {"model": MODEL, "prompt": f"{MARKER} and so on", "max_tokens": 16, "ignore_eos": True}
    seen: dict[tuple[str, str], float] = {}
    num_pages = 0
    with ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(observed.post, "/v1/completions", body) for _ in range(8)]
        while not all(answer.done() for answer in answers) or num_pages < 4:
            shown = dict(seen)  # of scrapes at one time any may be the first: only an earlier round is surely older
            for page in list(threads.map(lambda _: observed.page(), range(4))):
                num_pages += 1
                for family in text_string_to_metric_families(page):
                    for sample in family.samples if family.type in ("counter", "histogram") else ():
                        key = sample.name, str(sorted(sample.labels.items()))
                        assert sample.value >= shown.get(key, 0.0), key
                        seen[key] = max(sample.value, seen.get(key, 0.0))
            time.sleep(0.05)  # the requests need some of the machine, too
    assert [answer.result().status_code for answer in answers] == [200] * 8
    assert len(seen) > 300


def test_load_balancers_can_probe_with_head(observed: Observed) -> None:
    response = httpx.head(observed.cluster.endpoint + "/health", timeout=10)
    assert (response.status_code, response.content) == (200, b"")


def test_logs_follow_requests_through_all_processes_and_never_quote_prompts(observed: Observed) -> None:
    unique = uuid.uuid4().hex[:12]
    good, bad, failing = f"good-{unique}", f"bad-{unique}", f"failing-{unique}"
    prompt = f"{MARKER} {MARKER}"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "stream": True}
    endless = {**body, "max_tokens": 8000, "ignore_eos": True, "speculation": {"method": "none"}}

    assert observed.post("/v1/completions", body, good).status_code == 200
    assert observed.post("/v1/chat/completions", chat, good).status_code == 200
    assert observed.post("/v1/completions", {**body, MARKER: MARKER}, bad).status_code == 400
    assert observed.post("/v1/completions", {**body, "model": MARKER}, bad).status_code == 404
    assert observed.post("/v1/completions", {**body, "prompt": prompt * 20_000}, bad).status_code == 400
    assert observed.post(f"/{MARKER}?{MARKER}", body, bad).status_code == 404
    assert observed.post("/v1/completions", endless, failing).status_code == 504

    for request_id in (good, failing):
        wait_for(
            lambda request_id=request_id: (
                {"router", "prefill-1", "decode-1"}
                <= {line["process"] for line in observed.lines(request_id) if line["request_id"] == request_id}
            ),
            f"a line about {request_id} from every process",
        )
    wait_for(lambda: len([line for line in observed.lines(bad) if line.get("status")]) == 4, "lines about bad requests")
    assert {line["level"] for line in observed.lines(good) + observed.lines(bad)} <= {"info", "debug"}
    [warning] = [line for line in observed.lines(failing) if line["level"] == "warning"]
    assert (warning["process"], warning["outcome"]) == ("router", "deadline_exceeded")
    assert all("request_id" in line for line in observed.lines(unique))
    assert not any(MARKER in text for text in observed.log_texts())

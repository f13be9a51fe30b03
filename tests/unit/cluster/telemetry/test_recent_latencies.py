"""Percentiles over the last requests."""

from __future__ import annotations

from cluster.telemetry.recent_latencies import RecentLatencies

NONE = {"p50": None, "p95": None, "p99": None}


def test_percentiles_are_times_that_requests_had() -> None:
    latencies = RecentLatencies(lambda: 0.0)
    for number in range(1, 101):
        latencies.add(float(number), None if number % 2 else number / 10)
    status = latencies.status()
    assert status["requests"] == 100
    assert status["ttft_ms"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert status["tpot_ms"] == {"p50": 5.0, "p95": 9.6, "p99": 10.0}


def test_there_are_none_without_requests() -> None:
    assert RecentLatencies().status() == {"requests": 0, "ttft_ms": NONE, "tpot_ms": NONE}


def test_old_requests_and_all_but_the_last_512_do_not_count() -> None:
    now_s = 0.0
    latencies = RecentLatencies(lambda: now_s)
    for number in range(1000):
        latencies.add(float(number), None)
    assert latencies.status()["requests"] == 512
    now_s = 301.0
    latencies.add(7.0, None)
    assert latencies.status() == {"requests": 1, "ttft_ms": {"p50": 7.0, "p95": 7.0, "p99": 7.0}, "tpot_ms": NONE}

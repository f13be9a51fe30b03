"""Blocking calls to the endpoint of a running cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from baton.client.event_stream import DONE, EventSplitter, parse_event
from baton.core.roles import POOLS
from baton.engine.models.default_model import DEFAULT_MODEL_NAME

MODEL = DEFAULT_MODEL_NAME
RECOVERY_S = 60.0
_SETTLE_TIMEOUT_S = 30.0
BUSY = ("running", "waiting", "transfers", "kv_blocks_used", "in_flight")
"""Figures of a worker's load, by the worker and the router; finished hand-offs are recorded before the last is 0."""


def live_workers(status: Any, pool: str | None = None) -> list[dict[str, Any]]:
    """The workers in an answer of ``/admin/status`` that are not dead, of one pool or of both, with their ``pool``."""
    return [
        {"pool": name, **worker}
        for name in ([pool] if pool else status["pools"])
        for worker in status["pools"][name]["workers"]
        if worker["state"] != "dead"
    ]


def is_busy(worker: dict[str, Any]) -> bool:
    """Whether the worker has work, or does not answer."""
    return any(worker.get(name) != 0 for name in BUSY)


@dataclass(frozen=True)
class RunningCluster:
    """A cluster and blocking calls to its endpoint."""

    endpoint: str

    def get(self, path: str) -> Any:
        response = httpx.get(self.endpoint + path, timeout=30)
        response.raise_for_status()
        return response.json()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Any:
        response = httpx.post(self.endpoint + path, json=body, timeout=timeout_s)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **parameters: Any) -> Any:
        """One completion, by default greedy and with token ids."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, **parameters}
        return self.post("/v1/completions", body)

    def stream(self, body: dict[str, Any], timeout_s: float = 120.0) -> Iterator[list[int]]:
        """The token ids of each event of a streamed completion."""
        body = {**body, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{self.endpoint}/v1/completions", json=body, timeout=timeout_s) as response:
            assert response.status_code == 200, response.read()
            splitter = EventSplitter()
            for data in response.iter_bytes():
                for payload in splitter.feed(data):
                    if payload != DONE:
                        event = parse_event(payload)
                        assert "error" not in event, event
                        yield event["choices"][0]["token_ids"]

    def workers(self, pool: str | None = None) -> list[dict[str, Any]]:
        return live_workers(self.get("/admin/status"), pool)

    def states(self) -> list[str]:
        return [worker["state"] for worker in self.workers()]

    def metric(self, name: str) -> float:
        """The sum of a metric over its label sets."""
        lines = httpx.get(self.endpoint + "/metrics", timeout=30).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def scale(self, num_workers: int) -> None:
        """Gives both pools this many ready workers."""
        self.post("/admin/scale", dict.fromkeys(POOLS, num_workers))
        wait_for(lambda: self.states() == ["ready"] * len(POOLS) * num_workers, f"scaling to {num_workers}")

    def assert_nothing_leaked(self) -> None:
        """Waits until all workers answer and are idle, then checks that every block is free or cached."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        workers = self.workers()
        while busy := [worker for worker in workers if is_busy(worker)]:
            assert time.monotonic() < deadline, busy
            time.sleep(0.1)
            workers = self.workers()
        assert [worker for worker in workers if worker["kv_blocks_leaked"]] == []


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {RECOVERY_S:g} s"
        time.sleep(0.05)

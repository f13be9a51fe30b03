"""What clients notice of workers that freeze: ``python -m benchmarks.frozen_workers [--help]``.

Starts a cluster with two prefill and two decode workers, and stops the busiest worker of a pool (SIGSTOP) again and
again: for 5 s, for 40 s and for good. Half of the streams have begun by then; the others begin within the next seconds,
when the router may not know yet. All tokens are compared with those of an undisturbed round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Semaphore, Timer
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from baton.bench.latency import percentile
from baton.core.errors import DeadlineError
from baton.core.roles import POOLS
from baton.engine.models.default_model import DEFAULT_MODEL_NAME
from benchmarks.options import at_least
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster

_MODEL = DEFAULT_MODEL_NAME
_SETTINGS = {
    "dtype": "float32",  # recomputed tokens are compared
    "prefill": {"workers": 2, "kv_blocks": 1024},
    "decode": {"workers": 2, "kv_blocks": 1024},
    "router": {"port": 0},
    "routing": {"local_prefill": "never"},
    "admission": {"mode": "off"},  # a wait for admission would count as a pause
}
_FREEZES_S = (5.0, 40.0, float("inf"))
_LATE_OVER_S = 4.0
"""The late half of the streams begins within this time after the freeze."""
_HUNG_S = 120.0
_RECOVERY_S = 180.0
_POLL_S = 0.2
_PROMPT_TOKENS = 200
_BEGUN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream, as its client saw it.

    Attributes:
        pause_s: its longest time without a token, from sending the request on.
        lost_s: the part of its pauses that passed before the router gave the worker up; the rest is recomputation.
        error: what went wrong; empty if all tokens came.
    """

    token_ids: list[int]
    pause_s: float
    lost_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """The streams of one freeze.

    Attributes:
        pool: of the frozen worker; empty if none was frozen.
        num_changed: streams with other tokens than without a freeze.
    """

    pool: str
    seconds: float
    errors: list[str]
    num_changed: int
    pauses_s: list[float]
    lost_s: list[float]


class FrozenWorkers:
    """Freezes workers of a running cluster on this machine.

    Args:
        num_streams: of each half.
        num_tokens: of each stream.
    """

    def __init__(self, endpoint: str, num_streams: int, num_tokens: int) -> None:
        self._endpoint = endpoint
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._expected: list[list[int]] = []

    def undisturbed(self) -> Round:
        """A round without a freeze, with whose tokens others are compared."""
        streams = self._serve(lambda: None)
        self._expected = [stream.token_ids for stream in streams]
        return self._round("", 0.0, streams)

    def frozen(self, pool: str, seconds: float) -> Round:
        """A round in which the busiest worker of a pool is stopped, for this time or until it is replaced."""
        continuations: list[Timer] = []

        def freeze() -> None:
            pid = max(self._workers(pool), key=lambda worker: int(worker["in_flight"]))["pid"]
            os.kill(pid, signal.SIGSTOP)
            if seconds != float("inf"):
                continuations.append(Timer(seconds, _continue, (pid,)))
                continuations[0].start()

        streams = self._serve(freeze)
        for continuation in continuations:
            continuation.join()
        return self._round(pool, seconds, streams)

    def wait_until_complete(self) -> None:
        """Waits until both pools have two ready workers. Raises :class:`DeadlineError` if they do not."""
        give_up_s = time.monotonic() + _RECOVERY_S
        while [worker["state"] for pool in POOLS for worker in self._workers(pool)] != ["ready"] * 4:
            if time.monotonic() > give_up_s:
                raise DeadlineError(f"the pools were not complete after {_RECOVERY_S:g} s")
            time.sleep(_POLL_S)

    def _workers(self, pool: str) -> list[dict[str, Any]]:
        status = httpx.get(f"{self._endpoint}/admin/status", timeout=_HUNG_S).json()
        return [worker for worker in status["pools"][pool]["workers"] if worker["state"] != "dead"]

    def _serve(self, disturb: Callable[[], None]) -> list[Stream]:
        """Runs all streams, and disturbs them when the first half has begun."""
        begun = Semaphore(0)

        def late(number: int) -> Stream:
            time.sleep(_LATE_OVER_S * (number - self._num_streams) / self._num_streams)
            return self._stream(number, lambda: None)

        with ThreadPoolExecutor(2 * self._num_streams) as threads:
            early = [threads.submit(self._stream, number, begun.release) for number in range(self._num_streams)]
            for _ in early:
                begun.acquire(timeout=_HUNG_S)
            disturb()
            streams = early + [
                threads.submit(late, number) for number in range(self._num_streams, 2 * self._num_streams)
            ]
            return [stream.result() for stream in streams]

    def _stream(self, number: int, begun: Callable[[], object]) -> Stream:
        """Runs a stream; calls ``begun`` after its first tokens."""
        body = {
            "model": _MODEL,
            "prompt": [1000 + 7 * number + position for position in range(_PROMPT_TOKENS)],
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **({"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}),
        }
        tokens: list[int] = []
        request_id = ""
        last_s, pause_s, error = time.monotonic(), 0.0, ""
        try:
            with httpx.stream("POST", f"{self._endpoint}/v1/completions", json=body, timeout=_HUNG_S) as response:
                for line in response.iter_lines():
                    if not (data := line.removeprefix("data: ")) or data == "[DONE]":
                        continue
                    now_s = time.monotonic()
                    pause_s, last_s = max(pause_s, now_s - last_s), now_s
                    event = json.loads(data)
                    if "error" in event:
                        error = str(event["error"])
                        break
                    request_id = event["id"]
                    is_early = len(tokens) < _BEGUN_TOKENS
                    tokens += event["choices"][0]["token_ids"]
                    if is_early and len(tokens) >= _BEGUN_TOKENS:
                        begun()
        except httpx.HTTPError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Stream(tokens, pause_s, self._lost_s(request_id), error)

    def _lost_s(self, request_id: str) -> float:
        timeline = httpx.get(f"{self._endpoint}/v1/requests/{request_id}/timeline", timeout=_HUNG_S).json()
        lost_ms = sum(stage["duration_ms"] for stage in timeline.get("stages", ()) if stage["name"] == "retry")
        return float(lost_ms) / 1e3

    def _round(self, pool: str, seconds: float, streams: Sequence[Stream]) -> Round:
        return Round(
            pool,
            seconds,
            [stream.error for stream in streams if stream.error],
            sum(stream.token_ids != known for stream, known in zip(streams, self._expected, strict=True)),
            [stream.pause_s for stream in streams],
            [stream.lost_s for stream in streams],
        )


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was replaced
        os.kill(pid, signal.SIGCONT)


def show(rounds: Sequence[Round]) -> Table:
    """A row for each round, and one for all freezes."""
    table = Table(
        "pool", "frozen for", "streams", "failed", "changed", "pause p50", "p95", "max", "detection max", box=None
    )
    frozen = [each for each in rounds if each.pool]
    for name, seconds, group in [
        *((each.pool, f"{each.seconds:g} s" if each.pool else "", [each]) for each in rounds),
        *([(f"{len(frozen)} freezes", "", frozen)] if len(frozen) > 1 else []),
    ]:
        pauses = [pause for each in group for pause in each.pauses_s]
        table.add_row(
            name or "undisturbed",
            seconds.replace("inf s", "ever"),
            str(len(pauses)),
            str(sum(len(each.errors) for each in group)),
            str(sum(each.num_changed for each in group)),
            *(f"{percentile(pauses, share):.2f} s" for share in (50, 95, 100)),
            f"{max(lost for each in group for lost in each.lost_s):.2f} s",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=1, help="freezes of each length and pool")
    parser.add_argument("--streams", type=at_least(1), default=4, help="streams before the freeze, and again after it")
    parser.add_argument("--tokens", type=at_least(8), default=64, help="tokens of a stream")
    parser.add_argument("--json", type=Path, help="also write all rounds here")
    options = parser.parse_args()
    console = Console(width=100)
    cluster = Cluster.start(BatonConfig.from_dict(_SETTINGS), console.print)
    try:
        workers = FrozenWorkers(cluster.endpoint, options.streams, options.tokens)
        rounds = [workers.undisturbed()]
        for _ in range(options.rounds):
            for seconds in _FREEZES_S:
                for pool in POOLS:
                    rounds.append(workers.frozen(pool, seconds))
                    console.print(show(rounds[-1:]))
                    workers.wait_until_complete()
    finally:
        cluster.stop()
    console.print(show(rounds))
    for error in (error for each in rounds for error in each.errors):
        console.print(error)
    if options.json:
        document = {"format": "baton-frozen-workers", "rounds": [asdict(each) for each in rounds]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

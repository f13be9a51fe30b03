"""Clusters whose workers divide the model, in equal and unequal ways, and lose a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.core.request import SamplingParams
from tests.e2e.conftest import running_cluster
from tests.engine_runs import build_engine, run, tokens_of
from tests.ranked_models import PROMPTS as LONG_AND_SHORT
from tests.ranked_models import Build, build_with_draft, sampled, save_servable
from tests.running_cluster import RunningCluster

NUM_TOKENS = 60
PROMPTS = LONG_AND_SHORT[::4]
RECOVERY_S = 90.0
DEGREES = [
    pytest.param((2, 2), id="2-2"),
    *(
        pytest.param(degrees, id="-".join(map(str, degrees)), marks=pytest.mark.thorough(covered_by="[2-2]"))
        for degrees in ((2, 1), (1, 2), (4, 2), (2, 4))
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_servable(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Tokens of one process."""
    runner = build_with_draft(Build(str(folder)), None)[0]
    return tokens_of(run(build_engine(runner), PROMPTS, params()))


def params() -> list[SamplingParams]:
    """Every other request draws its tokens."""
    return sampled(len(PROMPTS), NUM_TOKENS)


@contextmanager
def divided_cluster(folder: Path, prefill: int, decode: int) -> Iterator[RunningCluster]:
    pool: dict[str, Any] = {"kv_blocks": 512, "chunk_tokens": 32}
    settings = {
        "model": str(folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "engine": {"block_size": 4},
        "router": {"port": 0, "worker_wait_s": RECOVERY_S},
        "prefill": {**pool, "tensor_parallel": prefill},
        "decode": {**pool, "tensor_parallel": decode},
        "kv_transfer": {"part_bytes": 4096},
        "routing": {"local_prefill": "never"},
    }
    with running_cluster(settings) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=DEGREES)
def cluster(request: pytest.FixtureRequest, folder: Path) -> Iterator[RunningCluster]:
    with divided_cluster(folder, *request.param) as running:
        yield running


def stream(cluster: RunningCluster, index: int, on_token: Callable[[int], None] = lambda count: None) -> list[int]:
    own = params()[index]
    body = {
        "model": "tiny",
        "prompt": PROMPTS[index],
        "max_tokens": own.max_tokens,
        "temperature": own.temperature,
        "seed": own.seed,
    }
    found: list[int] = []
    for new in cluster.stream(body, timeout_s=300):
        found += new
        on_token(len(found))
    return found


def followers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "follower_process" in " ".join(child.cmdline())]


def test_tokens_are_those_of_one_process(cluster: RunningCluster, expected: list[list[int]]) -> None:
    assert [stream(cluster, index) for index in range(len(PROMPTS))] == expected
    cluster.assert_nothing_leaked()


@pytest.mark.parametrize(
    ("pool", "wanted"),
    [
        pytest.param("decode", signal.SIGKILL, id="decode-killed"),
        pytest.param("prefill", signal.SIGSTOP, id="prefill-frozen"),
        pytest.param(
            "decode", signal.SIGSTOP, id="decode-frozen", marks=pytest.mark.thorough(covered_by="[prefill-frozen]")
        ),
        pytest.param(
            "prefill", signal.SIGKILL, id="prefill-killed", marks=pytest.mark.thorough(covered_by="[decode-killed]")
        ),
    ],
)
def test_a_worker_that_loses_a_rank_is_replaced(
    cluster: RunningCluster, expected: list[list[int]], pool: str, wanted: signal.Signals
) -> None:
    [worker] = cluster.workers(pool)
    ranks = followers_of(worker["pid"])
    if not ranks:
        return  # this pool's workers have one rank
    pending = [ranks[-1].pid]

    def interrupt(count: int) -> None:
        if count >= NUM_TOKENS // 4 and pending:
            os.kill(pending.pop(), wanted)

    assert stream(cluster, 0, interrupt) == expected[0]
    deadline = time.monotonic() + RECOVERY_S
    while [each["state"] for each in cluster.workers(pool) if each["id"] != worker["id"]] != ["ready"]:
        assert time.monotonic() < deadline, cluster.workers(pool)
        time.sleep(0.1)
    assert stream(cluster, 1) == expected[1]
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, ranks
        time.sleep(0.1)
    cluster.assert_nothing_leaked()

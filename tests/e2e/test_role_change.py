"""Role changes under load cut no request, and the worker computes the same tokens in its new role."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Settings
from tests.running_cluster import RunningCluster
from tests.tiny_models import random_prompts, tiny_model
from tests.tiny_tokenizers import byte_level_tokenizer

PROMPTS = random_prompts((5, 60, 33))
TIMEOUT_S = 60.0

Starter = Callable[[Settings], contextlib.AbstractContextManager[RunningCluster]]


@pytest.fixture(scope="module")
def cluster(start_cluster: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Three workers with a tiny model, and the autoscaler on, at a pace that leaves tests alone."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    byte_level_tokenizer()._hf.save_pretrained(folder)
    settings: Settings = {
        "model": str(folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "prefill": {"workers": 2, "kv_blocks": 64},
        "decode": {"workers": 1, "kv_blocks": 64, "max_num_seqs": 1},  # the second request goes to the other worker
        "autoscaler": {"enabled": True, "interval": "10min"},
    }
    with start_cluster(settings) as running:
        yield running


def answers(cluster: RunningCluster) -> list[list[int]]:
    def complete(prompt: list[int]) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        choice = cluster.post("/v1/completions", {**body, "ignore_eos": True})["choices"][0]
        assert len(choice["token_ids"]) == 24
        return choice["token_ids"]

    return [complete(prompt) for prompt in PROMPTS]


def ready(cluster: RunningCluster, pool: str) -> dict[str, int]:
    """Worker id → process."""
    return {worker["id"]: worker["pid"] for worker in cluster.workers(pool) if worker["state"] == "ready"}


def generated(cluster: RunningCluster, worker: str) -> float:
    lines = httpx.get(cluster.endpoint + "/metrics", timeout=30).text.splitlines()
    name = f'baton_worker_generated_tokens_total{{pool="{worker.split("-")[0]}",worker="{worker}"}}'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


def change_role(cluster: RunningCluster, source: str, destination: str) -> Any:
    return cluster.post("/admin/move", {"from": source, "to": destination})


def test_a_worker_changes_role_and_back_while_serving(cluster: RunningCluster) -> None:
    expected = answers(cluster)
    before = ready(cluster, "prefill")
    over = threading.Event()

    def keep_asking() -> int:
        rounds = 0
        while not over.is_set() and rounds < 500:
            assert answers(cluster) == expected
            rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking) for _ in range(2)]
        try:
            targets = change_role(cluster, "prefill", "decode")["pools"]
            assert (targets["prefill"]["target"], targets["decode"]["target"]) == (1, 2)
            until(lambda: len(ready(cluster, "decode")) == 2)
            assert ready(cluster, "decode")["decode-2"] == before["prefill-2"]
            assert list(ready(cluster, "prefill")) == ["prefill-1"]
            until(lambda: generated(cluster, "decode-2") > 0)  # it also answers requests that arrived during the change
            change_role(cluster, "decode", "prefill")
            until(lambda: len(ready(cluster, "prefill")) == 2)
        finally:
            over.set()
        assert all(future.result() > 0 for future in asking)
    assert ready(cluster, "prefill") == {"prefill-1": before["prefill-1"], "prefill-3": before["prefill-2"]}
    assert answers(cluster) == expected
    cluster.assert_nothing_leaked()


def test_the_last_worker_of_a_pool_keeps_its_role(cluster: RunningCluster) -> None:
    response = httpx.post(f"{cluster.endpoint}/admin/move", json={"from": "decode", "to": "prefill"}, timeout=30)
    assert response.status_code == 400
    assert "one must stay" in response.json()["error"]["message"]


def test_a_manual_pool_size_stays_until_it_is_released(cluster: RunningCluster) -> None:
    pools = cluster.post("/admin/scale", {"prefill": 2})["pools"]
    assert pools["prefill"]["pinned"]
    assert cluster.get("/admin/plan")["pools"]["prefill"]["reason"] == "pinned"
    pools = cluster.post("/admin/scale", {"prefill": "auto"})["pools"]
    assert "pinned" not in pools["prefill"]
    assert cluster.get("/admin/plan")["pools"]["prefill"]["reason"] != "pinned"


def test_plan_and_advice_are_reported(cluster: RunningCluster) -> None:
    def is_predicted() -> bool:
        """Workers were profiled at their start, and requests have come: some of them would keep their targets."""
        for _ in range(4):
            answers(cluster)
        pools = cluster.get("/admin/plan")["pools"]
        return all(pool["attainment"].get("standard", 0) > 0 for pool in pools.values())

    until(is_predicted, timeout_s=120.0)
    plan = cluster.get("/admin/plan")
    assert plan["enabled"]
    assert plan["move_obstacle"] == ""
    assert plan["traffic"]["requests_per_s"] > 0
    for name, pool in plan["pools"].items():
        assert pool["texts"][0].startswith(name)
    assert cluster.get("/admin/advise")["texts"]
    assert cluster.metric("baton_autoscaler_decisions_total") == 0

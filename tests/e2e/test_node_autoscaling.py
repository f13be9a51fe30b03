"""Ray's autoscaler adds nodes for workers that wait for a place, and removes those that sleeping pools have left."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.core.roles import POOLS
from cluster.nodes.ray_folder import RayFolder
from tests.engine_runs import build_engine, run, tokens_of
from tests.fake_cloud import FakeCloud
from tests.namespaces import hosts, why_no_namespaces
from tests.ranked_models import PROMPTS, Build, build_with_draft, sampled, save_servable
from tests.separate_nodes import BATON, START_S

PROBLEM = why_no_namespaces()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
PARAMS = sampled(len(PROMPTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_servable(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    runner = build_with_draft(Build(str(model)), None)[0]
    return tokens_of(run(build_engine(runner), PROMPTS, PARAMS))


@pytest.fixture(scope="module")
def cloud(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCloud]:
    with RayFolder() as folder, hosts(("head",)) as found:
        cloud = FakeCloud(found["head"], {}, tmp_path_factory.mktemp("logs"), folder=folder.path)
        cloud.start_head()
        cloud.begin_up(settings(model))
        yield cloud


def settings(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "served_model_name": "tiny",
        "dtype": "float32",
        "engine": {"block_size": 4, "decoder": "transformers"},
        "prefill": {"kv_blocks": 512},
        "decode": {"kv_blocks": 512},
        "routing": {"local_prefill": "never"},
        "router": {"worker_wait_s": START_S},
        "autoscaler": {
            "enabled": True,
            "interval": "1s",
            "calm": "1s",
            "prefill": {"min": 0, "max": 1},
            "decode": {"min": 0, "max": 1},
        },
    }


def tokens(cloud: FakeCloud, index: int) -> list[int]:
    """The tokens of the answer to a prompt."""
    own = PARAMS[index]
    body = {
        "model": "tiny",
        "prompt": PROMPTS[index],
        "max_tokens": own.max_tokens,
        "temperature": own.temperature,
        "seed": own.seed,
        "return_token_ids": True,
    }
    return list(cloud.cluster.post("/v1/completions", body, START_S)["choices"][0]["token_ids"])


def status(cloud: FakeCloud) -> str:
    """What `baton status` prints, in one line."""
    shown = cloud.head.run([*BATON, "status", "--endpoint", cloud.cluster.endpoint], 60)
    return " ".join(shown.split())


def sleeps(cloud: FakeCloud) -> bool:
    return cloud.cluster.workers() == [] and cloud.num_nodes == 0


def test_workers_wait_for_nodes_and_start_on_them(cloud: FakeCloud, expected: list[list[int]]) -> None:
    log = cloud.log_of(cloud.head, "up")
    for pool in POOLS:
        cloud.wait_for(lambda pool=pool: f"A {pool} worker needs 1 CPUs" in log.read_text(), f"the wait of {pool}")
    assert cloud.num_nodes == 0
    cloud.offer(1)
    cloud.wait_for(lambda: cloud.cluster.get("/ready"), "the cluster")
    assert cloud.num_nodes == len(POOLS)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:  # so many that the rate is known to have ended after ten seconds
        answers = threads.map(lambda index: tokens(cloud, index), range(len(PROMPTS)))
        assert list(answers) == expected


def test_pools_without_requests_give_their_nodes_back(cloud: FakeCloud) -> None:
    cloud.wait_for(lambda: sleeps(cloud), "sleep")
    assert "prefill 0 of 0" in status(cloud)


def test_a_request_brings_the_nodes_back(cloud: FakeCloud, expected: list[list[int]]) -> None:
    cloud.offer(0)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(tokens, cloud, 0)
        cloud.wait_for(lambda: "prefill-2 has waited for a node for" in status(cloud), "the wait")
        assert not answer.done()
        cloud.offer(1)
        assert answer.result() == expected[0]
    assert cloud.num_nodes == len(POOLS)

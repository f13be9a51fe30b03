"""Processes that are killed or stopped while a real cluster serves: what clients have of it is a pause."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from baton.core.roles import POOLS
from benchmarks.lost_routers import listeners
from tests.e2e.conftest import SMALL_CHUNKS
from tests.running_cluster import MODEL, RECOVERY_S, RunningCluster, wait_for

# float32 has wide margins between tokens: recomputing a sequence adds its numbers up in another order.
SETTINGS = SMALL_CHUNKS
PROMPT = "Write a long story about a lighthouse keeper and the ship that he saw one night.\n"
LONG_PROMPT = list(range(1000, 1800))
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
CONSTRAINED = {
    "temperature": 0.9,
    "seed": 3,
    "ignore_eos": False,
    "guided_json": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        "minItems": 30,
    },
}
NUM_TOKENS = 48

Line = dict[str, Any]


def stream(cluster: RunningCluster, prompt: Any, parameters: Line, num_tokens: int) -> Iterator[list[int]]:
    """The token ids of each event."""
    return cluster.stream(
        {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **parameters}
    )


def tokens(
    cluster: RunningCluster,
    prompt: Any,
    parameters: Line,
    num_tokens: int = NUM_TOKENS,
    on_token: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """All token ids of a stream; ``on_token`` hears how many there are after each event."""
    found: list[int] = []
    for new in stream(cluster, prompt, parameters, num_tokens):
        found.extend(new)
        on_token(len(found))
    return found


def kill_at(num_tokens: int, pid: int) -> Callable[[int], None]:
    """For ``on_token``: kills once there are so many tokens."""
    pending = [pid]

    def kill(count: int) -> None:
        if count >= num_tokens and pending:  # an event may bring several tokens
            os.kill(pending.pop(), signal.SIGKILL)

    return kill


def num_retries(cluster: RunningCluster) -> float:
    lines = httpx.get(f"{cluster.endpoint}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("baton_retries_total{"))


def only_worker(cluster: RunningCluster, pool: str) -> Line:
    [worker] = [worker for worker in cluster.workers(pool) if worker["state"] == "ready"]
    return worker


def assert_recovered(cluster: RunningCluster, pool: str, dead: Line) -> None:
    """The pool has another worker, nothing is left over anywhere, and new requests are served."""
    wait_for(
        lambda: (
            [w["state"] for w in cluster.workers(pool)] == ["ready"] and cluster.workers(pool)[0]["id"] != dead["id"]
        ),
        f"replacing {dead['id']}",
    )
    assert only_worker(cluster, pool)["pid"] != dead["pid"]
    assert len(tokens(cluster, "And now", GREEDY, 4)) == 4
    cluster.assert_nothing_leaked()


def test_streams_continue_after_the_decode_worker_is_killed(cluster):
    undisturbed = [tokens(cluster, PROMPT, parameters) for parameters in (GREEDY, SAMPLED, CONSTRAINED)]
    assert [len(found) for found in undisturbed] == [NUM_TOKENS] * 3
    victim = only_worker(cluster, "decode")
    retries = num_retries(cluster)

    kill_in_the_middle = kill_at(NUM_TOKENS // 3, victim["pid"])
    with ThreadPoolExecutor() as threads:
        others = [threads.submit(tokens, cluster, PROMPT, parameters) for parameters in (SAMPLED, CONSTRAINED)]
        greedy = threads.submit(tokens, cluster, PROMPT, GREEDY, NUM_TOKENS, kill_in_the_middle)
        disturbed = [greedy.result(), *(other.result() for other in others)]

    assert disturbed == undisturbed
    assert num_retries(cluster) > retries
    assert_recovered(cluster, "decode", victim)


def test_a_long_prompt_survives_the_loss_of_its_prefill_worker(cluster):
    undisturbed = tokens(cluster, LONG_PROMPT, GREEDY, 12)
    victim = only_worker(cluster, "prefill")
    retries = num_retries(cluster)
    other_prompt = [*LONG_PROMPT[400:], *LONG_PROMPT[:400]]
    with ThreadPoolExecutor() as threads:
        # Reversed halves: the prefix cache must not make the prompt short.
        long = threads.submit(tokens, cluster, other_prompt, GREEDY, 12)
        wait_for(lambda: only_worker(cluster, "prefill").get("running") == 1, "prefill")
        os.kill(victim["pid"], signal.SIGKILL)
        disturbed = long.result()
    assert num_retries(cluster) > retries
    assert_recovered(cluster, "prefill", victim)
    assert disturbed == tokens(cluster, other_prompt, GREEDY, 12)
    assert tokens(cluster, LONG_PROMPT, GREEDY, 12) == undisturbed


def test_a_restarted_router_uses_the_same_port(cluster):
    before = [worker["id"] for worker in cluster.workers()]
    os.kill(_listener(cluster.endpoint), signal.SIGKILL)

    def is_back() -> bool:
        try:
            return httpx.get(f"{cluster.endpoint}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_back, "the router's return")
    assert [worker["id"] for worker in cluster.workers()] == before
    assert len(tokens(cluster, PROMPT, GREEDY, 4)) == 4
    cluster.assert_nothing_leaked()


def test_a_router_that_hangs_is_replaced_on_the_same_port(cluster):
    before, router = [worker["id"] for worker in cluster.workers()], _listener(cluster.endpoint)
    os.kill(router, signal.SIGSTOP)
    wait_for(lambda: _listener_or_none(cluster.endpoint) not in (None, router), "the router's return")
    wait_for(lambda: len([w for w in cluster.workers() if "kv_blocks_used" in w]) == 2, "finding the workers again")
    assert not psutil.pid_exists(router)
    assert [worker["id"] for worker in cluster.workers()] == before
    assert len(tokens(cluster, PROMPT, GREEDY, 4)) == 4
    cluster.assert_nothing_leaked()


def test_killing_the_router_leaves_no_work_on_the_workers(cluster):
    router = _listener(cluster.endpoint)
    with pytest.raises(httpx.TransportError):
        tokens(cluster, PROMPT, GREEDY, 200, kill_at(5, router))
    wait_for(lambda: _listener_or_none(cluster.endpoint) not in (None, router), "the router's return")
    wait_for(lambda: len([w for w in cluster.workers() if "kv_blocks_used" in w]) == 2, "finding the workers again")
    cluster.assert_nothing_leaked()


def _listener_or_none(endpoint: str) -> int | None:
    return next(iter(listeners(int(endpoint.rsplit(":", 1)[1]))), None)


def _listener(endpoint: str) -> int:
    """Process id of the router."""
    pid = _listener_or_none(endpoint)
    assert pid is not None
    return pid


@pytest.fixture(scope="module")
def two_of_each(cluster: RunningCluster) -> Iterator[RunningCluster]:
    """The cluster with two workers in each pool, for the last tests of this module."""
    cluster.scale(2)
    yield cluster
    cluster.scale(1)


def freeze_busiest(cluster: RunningCluster) -> list[Line]:
    """Freezes a worker of each pool at once: the cluster's status would wait for one that is frozen already."""
    workers = cluster.workers()
    found = [
        max((worker for worker in workers if worker["id"].startswith(pool)), key=lambda worker: worker["in_flight"])
        for pool in POOLS
    ]
    for worker in found:
        os.kill(worker["pid"], signal.SIGSTOP)
    return found


def serve(cluster: RunningCluster, prompts: list[Any], disturb: Callable[[], None] = lambda: None) -> list[list[int]]:
    """The tokens of simultaneous streams, greedy and sampled, which are disturbed when all have begun."""
    requests = [(prompt, parameters) for prompt in prompts for parameters in (GREEDY, SAMPLED)]
    begun = threading.Barrier(len(requests) + 1)

    def run(prompt: Any, parameters: Line) -> list[int]:
        found: list[int] = []
        for new in stream(cluster, prompt, parameters, NUM_TOKENS):
            if len(found) < NUM_TOKENS // 8 <= len(found) + len(new):
                begun.wait(RECOVERY_S)
            found.extend(new)
        return found

    with ThreadPoolExecutor(len(requests)) as threads:
        streams = [threads.submit(run, *request) for request in requests]
        begun.wait(RECOVERY_S)
        disturb()
        return [each.result() for each in streams]


def test_streams_continue_while_workers_are_frozen_permanently(two_of_each):
    cluster = two_of_each
    prompts = [PROMPT, PROMPT[::-1]]
    undisturbed = serve(cluster, prompts)
    retries = num_retries(cluster)
    frozen: list[Line] = []

    def freeze() -> None:
        frozen.extend(freeze_busiest(cluster))

    long_prompt = [*LONG_PROMPT[300:], *LONG_PROMPT[:300]]
    with ThreadPoolExecutor() as threads:
        disturbed = threads.submit(serve, cluster, prompts, freeze)
        wait_for(lambda: len(frozen) == 2, "freezing")
        long = [threads.submit(tokens, cluster, [count, *long_prompt], GREEDY, 12) for count in range(4)]
        wait_for(lambda: "suspected" in cluster.states(), "a suspicion")
        assert disturbed.result() == undisturbed
        long_disturbed = [each.result() for each in long]

    assert num_retries(cluster) > retries
    gone = {worker["id"] for worker in frozen}
    wait_for(
        lambda: cluster.states() == ["ready"] * 4 and gone.isdisjoint(worker["id"] for worker in cluster.workers()),
        "the replacement",
    )
    known = [worker for pool in cluster.get("/admin/status")["pools"].values() for worker in pool["workers"]]
    assert all("it has not answered for" in worker["reason"] for worker in known if worker["id"] in gone)
    wait_for(lambda: not any(psutil.pid_exists(worker["pid"]) for worker in frozen), "the end of their processes")
    assert [tokens(cluster, [count, *long_prompt], GREEDY, 12) for count in range(4)] == long_disturbed
    assert cluster.metric("baton_worker_suspicions_total") >= 2
    cluster.assert_nothing_leaked()


def test_workers_that_were_frozen_for_a_while_are_used_again(two_of_each):
    cluster = two_of_each
    undisturbed = serve(cluster, [PROMPT])
    before, retries = [worker["id"] for worker in cluster.workers()], num_retries(cluster)

    def freeze_for_a_while() -> None:
        frozen = freeze_busiest(cluster)
        wait_for(lambda: cluster.states().count("suspected") == 2, "the suspicions")
        for worker in frozen:
            os.kill(worker["pid"], signal.SIGCONT)

    assert serve(cluster, [PROMPT], freeze_for_a_while) == undisturbed
    assert num_retries(cluster) > retries
    wait_for(lambda: cluster.states() == ["ready"] * 4, "the recovery")
    assert [worker["id"] for worker in cluster.workers()] == before
    assert serve(cluster, [PROMPT]) == undisturbed
    cluster.assert_nothing_leaked()

"""Ranks that die or freeze: the worker ends at once, nothing is left of it, and another one continues its requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request
from baton.engine.async_engine import AsyncEngine
from baton.engine.device.device_errors import DeviceLostError
from baton.engine.engine import Engine
from baton.engine.parallel.channel import Message
from baton.engine.parallel.followers import Followers
from baton.engine.parallel.group import RankGroup
from baton.engine.runner.model_runner import ModelRunner
from tests.engine_runs import build_engine
from tests.ranked_models import PROMPTS, Build, build_with_draft, divisible_model, ranked, sampled, save
from tests.waiting import until

SILENCE_S = 5.0
LOADING_SILENCE_S = 12.0
END_S = 15.0
NUM_TOKENS = 24
REQUESTS = range(8, 12)
PREFILL, DECODE = 1, 9
"""Steps: the first one, with prompts, and one in the middle of the answers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(divisible_model("llama"), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def whole(folder: str) -> ModelRunner:
    return build_with_draft(Build(folder), None)[0]


def requests() -> list[Request]:
    params = sampled(max(REQUESTS) + 1, NUM_TOKENS)
    return [Request(str(index), list(PROMPTS[index]), params[index], arrival_s=index) for index in REQUESTS]


def finish(engine: Engine, given: list[Request]) -> list[list[int]]:
    for request in given:
        engine.scheduler.add(request)
    while engine.scheduler.has_work():
        engine.step()
    return [request.output_token_ids for request in given]


@pytest.fixture(scope="module")
def expected(whole: ModelRunner) -> list[list[int]]:
    return finish(build_engine(whole), requests())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    shared = _shared_memory()
    yield
    mine = [child for child in psutil.Process().children() if "follower_process" in " ".join(child.cmdline())]
    assert mine == []
    assert _shared_memory() <= shared


def _shared_memory() -> set[str]:
    """Names of objects in shared memory, without semaphores and databases of other tests' processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "PostgreSQL."))}


def send_signal_at(followers: Followers, name: str, number: int, wanted: signal.Signals) -> None:
    """Sends the last follower a signal just before the ``number``-th message of a kind, counted from now."""
    send, seen = followers.send, 0

    def interrupting(message: Message) -> None:
        nonlocal seen
        seen += message[0] == name
        if message[0] == name and seen == number:
            os.kill(followers.pids[-1], wanted)
        send(message)

    followers.send = interrupting  # type: ignore[method-assign]


def wait_for_end(pid: int) -> None:
    """Returns when a process has ended; its parent need not have asked for its status."""
    deadline = time.monotonic() + END_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


SIGNALS = pytest.mark.parametrize("wanted", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])


@SIGNALS
@pytest.mark.parametrize(
    "step",
    [
        PREFILL,
        DECODE,
        *(pytest.param(step, marks=pytest.mark.thorough(covered_by="[9-")) for step in range(2, 24) if step != DECODE),
    ],
)
def test_another_worker_continues_with_the_same_tokens(
    folder: str, whole: ModelRunner, expected: list[list[int]], step: int, wanted: signal.Signals
) -> None:
    given = requests()
    with ranked(Build(folder), 2, SILENCE_S) as (runner, _, followers):
        send_signal_at(followers, "forward", step, wanted)
        with pytest.raises(DeviceLostError, match="rank 1"):
            finish(build_engine(runner), given)
        assert followers.failure is not None
        for pid in followers.pids:
            wait_for_end(pid)
    resumed = [
        Request(each.request_id, each.prompt_token_ids, each.params, output_token_ids=list(each.output_token_ids))
        for each in given
        if not each.is_finished
    ]
    found = {each.request_id: each.output_token_ids for each in given if each.is_finished}
    found |= dict(zip((each.request_id for each in resumed), finish(build_engine(whole), resumed), strict=True))
    assert [found[str(index)] for index in REQUESTS] == expected


@SIGNALS
def test_a_rank_is_lost_while_kv_moves(folder: str, wanted: signal.Signals) -> None:
    with ranked(Build(folder), 2, SILENCE_S) as (runner, _, followers):
        send_signal_at(followers, "move", 2, wanted)
        runner.cache.move([1, 2], [3, 4])
        with pytest.raises(DeviceLostError, match="rank 1"):
            move_until_it_fails(runner)


def move_until_it_fails(runner: ModelRunner) -> None:
    for _ in range(10):  # rank 0 does not wait for a move, but for room to send
        runner.cache.move([1, 2], [3, 4])
        time.sleep(SILENCE_S / 2)


@SIGNALS
def test_a_rank_is_lost_while_the_cache_is_shared(folder: str, wanted: signal.Signals) -> None:
    with pytest.raises(DeviceLostError, match="rank 1"), lost_at(folder, "share", wanted):
        pass


@SIGNALS
def test_a_rank_is_lost_while_it_loads(folder: str, wanted: signal.Signals) -> None:
    with pytest.raises(DeviceLostError, match="rank 1"), lost_at(folder, "begin", wanted):
        pass


@contextmanager
def lost_at(folder: str, name: str, wanted: signal.Signals) -> Iterator[None]:
    """Ranks of which one gets a signal at the first message of a kind while they start."""
    start = Followers.start

    def interrupted(followers: Followers, *arguments: Any) -> RankGroup:
        send_signal_at(followers, name, 1, wanted)
        return start(followers, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Followers, "start", interrupted)
        with ranked(Build(folder), 2, SILENCE_S, LOADING_SILENCE_S):
            yield


async def test_an_idle_engine_ends_when_a_rank_is_lost(folder: str) -> None:
    with ranked(Build(folder), 2, SILENCE_S) as (runner, _, followers):
        engine = AsyncEngine(runner, SchedulerLimits(64, 8, runner.loaded.max_model_len), num_threads=1)
        engine.start()
        os.kill(followers.pids[0], signal.SIGKILL)
        await until(engine.closed.is_set)
        await engine.stop()


def test_followers_end_with_their_leader(folder: str) -> None:
    """Even frozen ones, when the leader is killed."""
    script = (
        "import os, signal, sys; from tests.ranked_models import *;"
        f"context = ranked(Build({folder!r}), 2); _, _, followers = context.__enter__();"
        "os.kill(followers.pids[0], signal.SIGSTOP); print(followers.pids[0], flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    wait_for_end(int(out.stdout))

"""The ``baton`` command against a real cluster: what a user types, sees and gets back."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from baton.process.worker_environment import worker_variables
from cluster.nodes.ray_head import RayHead
from tests.user_machine import user_environment

BATON = [sys.executable, "-m", "cluster.cli.cli"]


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


class Machine:
    """A user's machine: its own record of what runs, the models and the compiled code of the real cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = user_environment(folder)

    def baton(self, *arguments: str, timeout_s: float = 120.0) -> Result:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        assert "Traceback" not in err, err
        return Result(process.returncode, out, err)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*BATON, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes that exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def runs(process: psutil.Process) -> bool:
    """A zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: list[psutil.Process], within_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + within_s
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert left == []


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def up(machine: Machine) -> Iterator[Result]:
    """What ``baton up --detach`` printed; the cluster runs until the module is done."""
    yield machine.baton("up", "--detach", "--set", "router.port=0")
    machine.baton("down")


@pytest.fixture
def baton(machine: Machine, up: Result) -> Callable[..., Result]:
    return machine.baton


def test_up_prints_the_endpoint_and_what_to_do_next(up: Result) -> None:
    assert up.status == 0, up.err
    assert up.out.startswith("http://127.0.0.1:")
    for part in ("starting a local Ray cluster", "ready: baton submit", "stop: baton down", "log: "):
        assert part in up.err


def test_a_second_up_names_the_running_cluster(baton: Callable[..., Result], up: Result) -> None:
    for arguments in (["up"], ["up", "--detach"]):
        second = baton(*arguments)
        assert second.status == 1
        assert f"A cluster already runs at {up.out.strip()}" in second.err
        assert "baton down" in second.err


def test_other_users_reach_neither_ray_nor_its_files(up: Result) -> None:
    [logs] = re.findall(r"log to (/\S+)", up.err)
    assert any(folder.stat().st_mode & 0o077 == 0 for folder in Path(logs).parents)
    running = psutil.process_iter(["cmdline"])
    gcs = next(process for process in running if f"--log_dir={logs}" in (process.info["cmdline"] or ()))
    port = min(own.laddr.port for own in gcs.net_connections("tcp") if own.status == psutil.CONN_LISTEN)
    assert RayHead(f"127.0.0.1:{port}", None).asks_for_token()


def test_status_shows_both_pools(baton: Callable[..., Result], up: Result) -> None:
    shown = baton("status")
    assert shown.status == 0
    assert f"smollm2-135m-instruct at {up.out.strip()}" in shown.out
    rows = [line.split()[:2] for line in shown.out.splitlines()]
    assert ["prefill-1", "ready"] in rows
    assert ["decode-1", "ready"] in rows
    assert "…" not in shown.out


def test_status_as_json_lists_every_worker(baton: Callable[..., Result], up: Result) -> None:
    status = json.loads(baton("status", "--json").out)
    assert status["endpoint"] == up.out.strip()
    assert status["model"] == "smollm2-135m-instruct"
    for pool in ("prefill", "decode"):
        (worker,) = status["pools"][pool]["workers"]
        assert worker["state"] == "ready"
        assert psutil.pid_exists(worker["pid"])
        process = psutil.Process(worker["pid"])
        assert process.nice() == psutil.Process().nice()  # the niceness of this process
        assert process.environ().items() >= worker_variables().items()
        assert worker["kv_blocks_total"] > 1
        assert worker["max_running"] > 1
        assert worker["kv_blocks_leaked"] == 0


def test_submit_gives_the_same_answer_plain_and_streamed(baton: Callable[..., Result]) -> None:
    plain = baton("submit", "What is the capital of France?", "--max-tokens", "20")
    streamed = baton("submit", "What is the capital of France?", "--max-tokens", "20", "--stream")
    assert plain.status == streamed.status == 0
    assert "Paris" in plain.out
    assert streamed.out == plain.out
    cut = baton("submit", "Tell me a long story.", "--max-tokens", "3")
    assert "truncated after 3 tokens" in cut.err


def test_submit_reports_a_request_that_the_router_refuses(baton: Callable[..., Result]) -> None:
    refused = baton("submit", "Hello", "--max-tokens", "0")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err.startswith("error: ")
    assert "max_tokens" in refused.err


def test_submit_makes_a_batch_of_a_file(baton: Callable[..., Result], machine: Machine) -> None:
    lines = [
        json.dumps({"id": "france", "prompt": "What is the capital of France?"}),
        json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
        json.dumps({"prompt": "Hello", "tempratur": 0}),
    ]
    (machine.folder / "in.jsonl").write_text("\n".join([*lines, '{"prompt": "no end']))
    assert "Line 4: not JSON" in baton("submit", "-f", "in.jsonl", "-o", "out.jsonl").err
    (machine.folder / "in.jsonl").write_text("\n".join(lines))
    result = baton("submit", "-f", "in.jsonl", "-o", "out.jsonl", "--max-tokens", "20")
    assert result.status == 1
    assert "completed, 2 answered, 1 failed, of 3" in result.err
    france, hello, misspelt = map(json.loads, (machine.folder / "out.jsonl").read_text().splitlines())
    assert france["id"] == "france"
    assert "Paris" in france["text"]
    assert hello["usage"]["completion_tokens"] == 2
    assert "did you mean 'temperature'" in misspelt["error"]["message"]


@pytest.mark.thorough(
    covered_by="tests/e2e/test_simulated_cluster.py::test_scale_waits_for_the_new_sizes"
)  # and test_serving scales real workers
def test_scale_grows_and_shrinks_pools(baton: Callable[..., Result]) -> None:
    grown = baton("scale", "prefill=1", "decode=2", "--wait")
    assert (grown.status, grown.out) == (0, "prefill: 1, decode: 2\n"), grown.err
    lines = grown.err.splitlines()
    # A slow start is explained, and the explanation lists nodes.
    told = [line for line in lines if re.match(r"(prefill|decode)(-\d+)?: ", line)]
    assert len(told) == len(set(told)), "the same progress again and again"
    pools = json.loads(baton("status", "--json").out)["pools"]
    assert [worker["state"] for pool in pools.values() for worker in pool["workers"]] == ["ready"] * 3
    assert baton("submit", "Hello", "--max-tokens", "4").status == 0
    shrunk = baton("scale", "prefill=1", "decode=1", "--wait")
    assert (shrunk.status, shrunk.out) == (0, "prefill: 1, decode: 1\n"), shrunk.err
    left = [worker for pool in pools.values() for worker in pool["workers"]]
    pools = json.loads(baton("status", "--json").out)["pools"]
    staying = {worker["pid"] for pool in pools.values() for worker in pool["workers"]}
    assert len(staying) == 2
    assert_gone(processes_of({worker["pid"] for worker in left} - staying))
    assert baton("submit", "Hello", "--max-tokens", "4").status == 0


def test_down_ends_every_process_and_reports_when_no_cluster_runs(machine: Machine, up: Result) -> None:
    [record] = (machine.folder / "cache" / "run").glob("*/cluster.json")
    state = json.loads(record.read_text())
    processes = [psutil.Process(state["pid"]), *descendants(state["pid"])]
    assert len(processes) > 4
    stopped = machine.baton("down")
    assert (stopped.status, stopped.out) == (0, f"Stopped the cluster at {up.out.strip()}.\n")
    assert_gone(processes)
    again = machine.baton("down")
    assert (again.status, again.out) == (0, f"No cluster runs on this machine, as far as {record} says.\n")
    orphaned = machine.baton("submit", "Hello")
    assert orphaned.status == 1
    assert f"No cluster runs on this machine, as far as {record} says. Start one with `baton up`" in orphaned.err


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_up_reports_a_port_in_use(machine: Machine, taken_port: int) -> None:
    result = machine.baton("up", "--set", f"router.port={taken_port}")
    assert (result.status, result.out) == (1, "")
    assert f"port {taken_port}: Address already in use" in result.err


def test_up_reports_a_wrong_configuration(machine: Machine) -> None:
    (machine.folder / "bad.yaml").write_text("prefil: {workers: 2}\ndecode: {workers: none}\n")
    for detach in ([], ["--detach"]):
        result = machine.baton("up", "-c", "bad.yaml", *detach)
        assert result.status == 1
        assert "bad.yaml: unknown key prefil. Did you mean prefill?" in result.err
        assert "bad.yaml: decode.workers must be a valid integer, got 'none'." in result.err


def test_up_reports_a_missing_model(machine: Machine) -> None:
    for model, message in {
        "smollm2-135m-instuct": "Did you mean smollm2-135m-instruct?",
        "./no/such/folder": "is a local path, but there is no file or folder",
        "no-such.gguf": "is a local path, but there is no file or folder",
    }.items():
        result = machine.baton("up", "--set", f"model={model}", "--set", "router.port=0")
        assert result.status == 1
        assert message in result.err


def test_up_reports_a_folder_without_a_model(machine: Machine) -> None:
    """The only one of these faults that shows when the workers start."""
    (machine.folder / "empty-model").mkdir()
    (machine.folder / "empty-model" / "config.json").write_text('{"model_type": "nonsense"}')
    result = machine.baton("up", "--detach", "--set", "model=empty-model", "--set", "router.port=0")
    assert (result.status, result.out) == (1, "")
    assert "before it was ready" in result.err
    assert "empty-model" in result.err
    assert machine.baton("status").status == 1


# SIGTERM to one that is ready is what `baton down` sends, above.
@pytest.mark.parametrize(("number", "when"), [(signal.SIGINT, "ready: "), (signal.SIGTERM, "starting the router")])
def test_a_signal_to_a_foreground_cluster_ends_every_process(
    machine: Machine, number: signal.Signals, when: str
) -> None:
    is_ready = when.startswith("ready")
    # What is ready differs little between workers with a model and those without, and the latter are so much sooner.
    simulated = ("--set", "simulation.profile=h100-8b") if is_ready else ()
    process = machine.start("up", "--set", "router.port=0", *simulated)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(when):
            break
    if not is_ready:
        time.sleep(1.0)  # workers are on their way
    processes = descendants(process.pid)
    assert len(processes) >= 4
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert ("shutting down" if is_ready else "stopped before it was ready") in err
    assert_gone(processes)

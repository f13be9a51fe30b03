"""A `baton up` that was killed or does not end: `baton down`, and the router that is left."""

import subprocess
import sys

import pytest

from baton.client.local_cluster import RunState, read_state, write_state
from baton.core.errors import ConfigError
from baton.process.start_mark import start_mark
from cluster.config.config import BatonConfig
from cluster.controller import launch
from tests.unit.cluster.command_line import baton, environment, router

__all__ = ["baton", "environment", "router"]  # fixtures


def write_killed(address: str | None, endpoint: str = "http://127.0.0.1:5") -> None:
    """Records a `baton up` whose process is gone."""
    config = BatonConfig.from_dict({"ray": {"address": address}}).to_dict()
    write_state(RunState(pid=2**22 + 1, start="another", endpoint=endpoint, config=config))


def test_down_ends_what_a_killed_up_has_left_on_a_lasting_ray(baton, monkeypatch):
    ended = []
    monkeypatch.setattr(launch, "end_without_controller", lambda config, report: ended.append(config.ray.address) or 3)
    write_killed("10.0.0.1:6379")
    assert "Ended 3 processes of the cluster at http://127.0.0.1:5" in baton("down")[1]
    assert (ended, read_state()) == (["10.0.0.1:6379"], None)
    write_killed(None)
    assert "has already ended" in baton("down")[1]
    assert len(ended) == 1


@pytest.fixture
def recorded():
    """Runs a program as the process of a recorded cluster, and never reaps it before the end of the test."""
    processes = []

    def run(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        process.stdout.readline()  # it has begun
        write_state(RunState(process.pid, start_mark(process.pid) or "", "http://127.0.0.1:5", BatonConfig().to_dict()))
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_down_does_not_wait_for_a_process_that_nobody_reaps(baton, recorded):
    recorded("import time; print(flush=True); time.sleep(60)")
    assert baton("down")[1] == "Stopped the cluster at http://127.0.0.1:5.\n"


def test_down_names_the_remedy_for_a_process_that_does_not_end(baton, recorded):
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = recorded(ignores)
    status, _, err = baton("down", "--timeout", "0.3")
    assert (status, read_state().pid) == (1, process.pid)
    assert "has not ended after 0.3 s but is still shutting down. Wait longer with --timeout." in err
    assert f"`kill -9 {process.pid}` ends it" in err


def test_down_reports_that_ray_is_gone_too(baton, monkeypatch):
    def fail(config, report):
        raise ConfigError("Ray cannot be reached")

    monkeypatch.setattr(launch, "end_without_controller", fail)
    write_killed("10.0.0.1:6379")
    status, out, err = baton("down")
    assert (status, "has already ended" in out, "Ray cannot be reached" in err) == (0, True, True)
    assert read_state() is None


def test_commands_reach_the_router_that_a_killed_up_has_left(baton, router):
    write_killed(None, router.endpoint)
    assert "No cluster runs on this machine" in baton("status")[2]
    write_killed("10.0.0.1:6379", router.endpoint)
    assert router.endpoint in baton("status")[1]

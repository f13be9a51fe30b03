"""``baton reload``: keys and classes without a restart; what is invalid changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client.local_cluster import RunState, read_state, take_upgrade_request, write_state
from baton.process.start_mark import start_mark
from tests.unit.cluster.command_line import baton, environment, router

__all__ = ["baton", "environment", "router"]  # fixtures

KEY = "0123456789abcdef"


@pytest.fixture
def config(tmp_path: Path, baton):
    """The configuration of a detached cluster, without its model, which runs within the test."""
    file = tmp_path / "config.yaml"
    assert baton("up", "--detach", "-c", "config.yaml", "--set", "slo.default=batch")[0] == 0
    yield file
    assert baton("down")[0] == 0


def test_keys_and_classes_are_reloaded(baton, config: Path) -> None:
    before = read_state()
    assert before is not None
    assert before.reload is None
    model = config.parent / "model"
    keys = f"{{port: 0, api_keys: [{{name: web, key: {KEY}}}]}}"
    config.write_text(f"model: {model}\nrouter: {keys}\nslo: {{classes: {{fast: {{ttft: 1s, tpot: 1s}}}}}}")
    status, out, err = baton("reload")
    assert (status, out) == (0, "Reloaded: 1 API keys, 4 SLO classes.\n"), err
    state = read_state()
    assert state is not None
    assert state.config["router"]["api_keys"][0]["name"] == "web"
    assert state.config["slo"]["default"] == "batch", "an override of the start was forgotten"
    assert (state.endpoint, state.pid) == (before.endpoint, before.pid)
    assert state.log_file is not None
    log = Path(state.log_file).read_text()
    assert "keys: ['web']" in log
    assert "Reloaded: 1 API keys" in log
    config.write_text(f"model: {config.parent / 'model'}\nrouter: {{port: 0}}")
    assert baton("reload")[1] == "Reloaded: no API keys, 3 SLO classes.\n"


def test_other_changes_are_named(baton, config: Path) -> None:
    model = config.parent / "model"
    config.write_text(f"model: {model}\nrouter: {{port: 9, keep_alive_s: 5.0}}\ndecode: {{workers: 2}}")
    assert baton("reload")[1] == (
        "Reloaded: no API keys, 3 SLO classes. These changes need a restart: decode.workers, router.keep_alive_s, "
        "router.port.\n"
    )
    state = read_state()
    assert state is not None
    assert state.config["router"]["port"] == 0
    assert baton("reload")[1].count("router.port") == 1


INVALID = {
    "router: {prot: 0}": "unknown key router.prot",
    "router: {api_keys: [{name: web, key: short}]}": "key is not valid",
    "router: {api_keys: [{name: web, key_env: MISSING_KEY}]}": "MISSING_KEY",
    "slo: {classes: {interactive: {ttft: never}}}": "slo.classes.interactive.ttft",
    ": :": "not valid YAML",
    f"router: {{api_keys: [{{name: refused, key: {KEY}}}]}}": "the router refused the keys",
}


def test_an_invalid_file_changes_nothing(baton, config: Path) -> None:
    before = read_state()
    assert before is not None
    for text, reason in INVALID.items():
        config.write_text(text)
        status, out, err = baton("reload")
        assert (status, out) == (1, "")
        assert "nothing has changed" in err, Path(str(before.log_file)).read_text()
        assert reason in err
        after = read_state()
        assert after is not None
        assert after.config == before.config
        assert after.reload is not None
        assert not after.reload.is_applied
        assert after.is_running()


def test_without_a_cluster_nothing_is_signalled(baton) -> None:
    assert "No cluster runs" in baton("reload")[2]
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        write_state(RunState(bystander.pid, start="another", endpoint="http://127.0.0.1:5"))
        assert "No cluster runs" in baton("reload")[2]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_starting_cluster_is_not_reloaded(baton) -> None:
    write_state(RunState.of_this_process({}))
    assert "is still starting" in baton("reload")[2]


def test_a_cluster_that_does_not_answer_is_reported(baton) -> None:
    previous = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        write_state(replace(RunState.of_this_process({}), endpoint="http://127.0.0.1:5"))
        status, _, err = baton("reload", "--timeout", "0.1")
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert status == 1
    assert "has not reloaded its configuration after 0.1 s" in err


def test_a_stopped_process_is_named_and_asked_for_nothing(baton, router) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            state = RunState(process.pid, start=start_mark(process.pid) or "", endpoint=router.endpoint)
            write_state(state)
            assert baton("status")[2] == ""
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            text = f"`baton up` (process {process.pid}) is stopped, so it replaces no controller, reloads nothing and"
            status, out, err = baton("status")
            assert (status, "decode" in out) == (0, True)
            assert err.startswith(f"warning: {text}")
            assert err.endswith(f"Continue it with `kill -CONT {process.pid}`.\n")
            assert baton("reload")[::2] == (1, err.replace("warning: ", "error: "))
            assert baton("upgrade", "--set", "decode.workers=2")[2].endswith(err.replace("warning: ", "error: "))
            process.send_signal(signal.SIGCONT)
            os.waitpid(process.pid, os.WCONTINUED)
            assert take_upgrade_request() is None
            assert process.poll() is None  # SIGHUP would have ended it
        finally:
            process.kill()


def test_the_signal_alone_reloads(config: Path) -> None:
    state = read_state()
    assert state is not None
    os.kill(state.pid, signal.SIGHUP)
    deadline_s = time.monotonic() + 20
    while (now := read_state()) is None or now.reload is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert now.reload.is_applied

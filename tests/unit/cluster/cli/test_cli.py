"""The command line: what it prints, its exit status, and that user errors never show a traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.client.local_cluster import RunState, read_state, state_file, write_state
from baton.core.errors import ConfigError
from cluster.cli.cli_up import check_configuration
from cluster.config.config import BatonConfig
from tests.unit.cluster.command_line import baton, environment, router
from tests.waiting import TIMEOUT_S

__all__ = ["baton", "environment", "router"]  # fixtures


def start_up(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.cli.cli", "up", "-c", "config.yaml", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def has_endpoint() -> bool:
    state = read_state()
    return state is not None and state.endpoint is not None


def test_without_a_cluster_the_error_tells_how_to_start_one(baton):
    status, _, err = baton("submit", "hello")
    assert status == 1
    assert "baton up" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit"],
        ["submit", " "],
        ["submit", "a", "-f", "b"],
        ["submit", "-f", "b", "-o", "c", "--detach"],
        ["submit", "-f", "b", "--service-tier", "batch"],
        ["submit", "a", "-o", "b"],
        ["submit", "-f", "a", "-o", "b", "--stream"],
        ["submit", "a", "--max-tokens", "many"],
        ["serve"],
        ["scale"],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(baton, arguments, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).touch()
    status, _, err = baton(*arguments)
    assert status == 2
    assert "Traceback" not in err


# --- status and scale ---


def test_status_shows_the_address_of_the_cluster(baton, router):
    status, out, _ = baton("status", router=router)
    assert status == 0
    assert f"fake [model] at {router.endpoint}, up for 1 h 2 min" in out


def test_status_as_json_is_the_answer_of_the_router_and_its_address(baton, router):
    status, out, _ = baton("status", "--json", router=router)
    assert status == 0
    assert json.loads(out) == {"endpoint": router.endpoint, **router.status()}


def test_scale_sets_pool_sizes_and_waits(baton, router):
    status, out, _ = baton("scale", "prefill=2", "decode=3", router=router)
    assert (status, out) == (0, "prefill: 2, decode: 3\n")
    assert router.bodies == [{"prefill": 2, "decode": 3}]


def test_scale_gives_up_if_workers_do_not_start(baton, router):
    router.states = "starting"
    status, _, err = baton("scale", "prefill=2", "--timeout", "0", router=router)
    assert status == 1
    assert "Now: prefill: 2 starting" in err
    assert baton("scale", "prefill=2", "--no-wait", router=router)[0] == 0


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("prefil=2", "Did you mean prefill?"),
        ("router=2", "Known pools: prefill, decode"),
        ("prefill", "expected POOL=NUMBER"),
        ("prefill=0", "at least 1"),
        ("prefill=-1", "at least 1"),
        ("prefill=two", "at least 1"),
        ("prefill=99", "No node has room"),
    ],
)
def test_a_wrong_scale_argument_is_explained(baton, router, argument, expected):
    status, _, err = baton("scale", "decode=1", argument, router=router)
    assert status == 1
    assert expected in err


# --- up and down ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_a_signal_and_shuts_down(number):
    process = start_up()
    wait_for(has_endpoint)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "http://127.0.0.1:5\nstopped cleanly\n"
    assert "starting workers" in err
    assert "Traceback" not in err
    assert read_state() is None


def test_down_ends_a_suspended_cluster(baton):
    process = start_up()
    wait_for(has_endpoint)
    process.send_signal(signal.SIGSTOP)
    assert baton("down")[1] == "Stopped the cluster at http://127.0.0.1:5.\n"
    assert process.wait(60) == 0


def test_a_signal_during_the_start_ends_it():
    process = start_up("--set", "served_model_name=slow")
    wait_for(lambda: read_state() is not None)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "stopped before it was ready" in err
    assert read_state() is None


def test_a_cluster_that_dies_is_an_error_and_is_cleaned_up():
    process = start_up(CLUSTER_DIES="1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the router died" in err
    assert "stopped cleanly" in out
    assert read_state() is None


def test_a_cluster_that_does_not_start_is_an_error(baton):
    _, err = start_up("--set", "served_model_name=broken").communicate(timeout=60)
    assert err.endswith("error: no [GPU] anywhere\n")
    assert "Traceback" not in err


def test_impossible_configurations_are_errors_before_anything_starts(baton, router):
    port = router.server_address[1]
    status, _, err = baton("up", "-c", "config.yaml", "--set", f"router.port={port}")
    assert (status, err.count("\n")) == (1, 1)
    assert f"Cannot listen on router.host 127.0.0.1 port {port}: Address already in use" in err
    assert baton("up", "--set", "router.port=0", "--set", "model=nonsense")[0] == 1
    status, _, err = baton("up", "--set", "router.port=0", "--set", "simulation.profile=h100-8")
    assert (status, err.count("\n")) == (1, 1)
    assert "'h100-8' is neither a file nor a built-in profile. Did you mean 'h100-8b'?" in err
    assert read_state() is None


def test_a_draft_that_does_not_fit_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"draft_vocab_size": 5}')
    for draft, reason in (("head", "contains no weights"), ("nothing", "does not exist")):
        _, err = start_up("--set", f"speculation.draft={draft}").communicate(timeout=TIMEOUT_S)
        assert "error: draft checkpoint:" in err
        assert reason in err
        assert "starting workers" not in err


@pytest.mark.parametrize("flags", [[], ["--detach"]])
@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("speculation.draft=nothing", "'nothing' does not exist"),
        ("speculation.draft=head", "head contains no weights"),
        ("speculation.method=medusa", "speculation.method is medusa, but no draft is loaded"),
        ("model=nonsense", "'nonsense' is not the bundled model"),
        ("simulation.profile=h100-8", "Did you mean 'h100-8b'?"),
    ],
)
def test_a_wrong_configuration_is_reported_once_beside_a_running_cluster(baton, tmp_path, assignment, reason, flags):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"draft_vocab_size": 5}')
    mine = RunState.of_this_process({}, None)
    write_state(mine)
    status, out, err = baton("up", "-c", "config.yaml", "--set", assignment, *flags)
    assert (status, out) == (1, "")
    assert err.count(reason) == err.count("error:") == err.count("\n") == 1
    assert read_state() == mine
    status, _, err = baton("up", "-c", "config.yaml", *flags)
    assert (status, "A cluster already runs" in err) == (1, True)


def test_a_context_beyond_the_model_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"max_position_embeddings": 64}')
    chosen = ("--set", "model=tiny", "--set", "speculation.draft=none", "--set", "speculation.method=ngram")
    _, err = start_up(*chosen, "--set", "max_model_len=65").communicate(timeout=TIMEOUT_S)
    assert err.endswith(
        "error: max_model_len is 65, but the model's context length is 64. Lower it, or leave it out to use as "
        "much as the model and the KV cache allow.\n"
    )
    assert "starting workers" not in err


def test_configuration_checks_download_nothing(monkeypatch):
    def fetch(*arguments, **options):
        raise AssertionError("something was fetched")

    for name in (
        "baton.engine.models.model_source.ensure_default_model",
        "baton.engine.models.model_source.ensure_converted",
    ):
        monkeypatch.setattr(name, fetch)
    monkeypatch.setattr("baton.engine.draft.checkpoint_files.snapshot_download", fetch)
    for draft in ("auto", "none", "owner/head", "small.gguf", "smollm2-135m-instruct"):
        for model in ("smollm2-135m-instruct", "owner/model", "model.gguf"):
            check_configuration(BatonConfig.from_dict({"model": model, "speculation": {"draft": draft}}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"speculation": {"method": "none", "shadow": "draft_model", "draft": "none"}},
            r"speculation\.shadow is draft_model, but no draft is loaded",
        ),
        (
            {"speculation": {"method": "none", "shadow": "medusa", "draft": "eagle3"}},
            r"speculation\.shadow is medusa, but .* is for the method eagle3",
        ),
        (
            {"speculation": {"method": "medusa", "draft": "eagle3"}},
            r"speculation\.method is medusa, but .* is for the method eagle3",
        ),
        (
            {"security": {"ca": "/no/ca", "certificate": "/no/node", "key": "/no/key"}},
            r"security\.ca: /no/ca cannot be read",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(values, message):
    with pytest.raises(ConfigError, match=message):
        check_configuration(BatonConfig.from_dict(values))


def test_a_wrong_configuration_is_an_error(baton):
    status, _, err = baton("up", "--set", "router.prot=1")
    assert status == 1
    assert "Did you mean router.port?" in err


def test_detach_returns_when_ready_and_down_stops_the_cluster(baton):
    status, out, err = baton("up", "--detach", "-c", "config.yaml")
    state = read_state()
    assert (status, out) == (0, "http://127.0.0.1:5\n")
    assert state is not None
    assert state.log_file is not None
    said = err.splitlines()
    assert said[:3] == ["starting workers", "prefill-1 is ready", "decode-1 is ready"]
    assert said[3].endswith("stop: baton down")
    assert said[4:] == [f"log: {state.log_file}"]
    assert state.config["router"]["port"] == 0
    status, _, err = baton("up", "--detach", "-c", "config.yaml")
    assert status == 1
    assert "already runs at http://127.0.0.1:5" in err
    assert baton("down")[1] == "Stopped the cluster at http://127.0.0.1:5.\n"
    assert "stopped cleanly" in Path(state.log_file).read_text()
    assert read_state() is None


def test_detach_shows_the_log_of_a_cluster_that_ends(baton):
    status, out, err = baton("up", "--detach", "-c", "config.yaml", "--set", "served_model_name=broken")
    assert (status, out) == (1, "")
    assert "before it was ready" in err
    assert err.count("starting workers") == 1
    assert err.count("no [GPU] anywhere") == 1, "said twice"
    assert err.endswith("baton.log:\n  error: no [GPU] anywhere\n")


def test_down_without_a_cluster_reports_it(baton):
    assert baton("down")[:2] == (0, f"No cluster runs on this machine, as far as {state_file()} says.\n")


def test_down_never_signals_another_process(baton):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        write_state(RunState(bystander.pid, start="another", endpoint="http://127.0.0.1:5"))
        status, out, _ = baton("down")
        assert status == 0
        assert "has already ended" in out
        assert bystander.poll() is None
        assert read_state() is None
    finally:
        bystander.kill()
        bystander.wait()


# --- the rest ---


def test_model_pull_refuses_unavailable_models(baton):
    status, _, err = baton("model", "pull", "gpt-5")
    assert status == 1
    assert "smollm2-135m-instruct" in err


def test_version_lists_the_main_dependencies(baton):
    status, out, _ = baton("version")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "baton",
        "python",
        "ray",
        "torch",
        "transformers",
        "grpcio",
    ]


def test_help_is_quick_to_import():
    code = (
        "import sys\nfrom cluster.cli import cli\n"
        "for command in ([], ['advise'], ['trace', 'export']):\n    assert cli.run([*command, '--help']) == 0\n"
        "assert cli.run(['advise', '--alpha', '0.7', '--draft-cost', '0.15']) == 0\n"
        "heavy = {'ray', 'torch', 'transformers', 'openai', 'grpc', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

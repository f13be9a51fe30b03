"""``baton upgrade``: the plan, the progress, the outcome, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.client.local_cluster import (
    RunState,
    UpgradeProgress,
    UpgradeRequest,
    read_state,
    write_state,
    write_upgrade_request,
)
from cluster.cli.cli_reload import hang_up
from cluster.cli.run_record import ConfigSource
from tests.unit.cluster.command_line import baton, environment, router

__all__ = ["baton", "environment", "router"]  # fixtures


@pytest.fixture
def config(tmp_path: Path, baton: Any) -> Any:
    """The configuration of a detached cluster, without its model, which runs within the test."""
    file = tmp_path / "config.yaml"
    assert baton("up", "--detach", "-c", "config.yaml")[0] == 0
    yield file
    (tmp_path / "hold").unlink(missing_ok=True)
    assert baton("down")[0] == 0


def recorded() -> RunState:
    state = read_state()
    assert state is not None
    return state


def test_an_upgrade_shows_its_plan_progress_and_outcome(baton, config: Path) -> None:
    config.with_name("new.yaml").write_text(f"model: {config.parent / 'model'}\nrouter: {{port: 0}}\n")
    status, out, err = baton("upgrade", "-c", "new.yaml", "--set", "decode.kv_blocks=64", "--set", "decode.workers=2")
    assert (status, err.splitlines()) == (0, ["decode-2 is ready", "decode-3 has been waited for"])
    assert out.splitlines() == [
        "decode.kv_blocks: null → 64",
        "decode.workers: 1 → 2",
        "prefill: workers are not touched",
        "decode: every worker is replaced, because of decode.kv_blocks; scaled to 2",
        "Upgraded: all workers run with the new configuration.",
    ]
    assert recorded().config["decode"]["kv_blocks"] == 64
    assert baton("upgrade", "-c", "new.yaml", "--set", "decode.kv_blocks=64", "--set", "decode.workers=2")[1] == (
        "Nothing differs from the running configuration.\n"
    )
    assert "restart" not in baton("reload")[1], "a reload must read the new file with the new overrides"


def test_workers_that_are_not_ready_at_the_end_are_named(baton, config: Path) -> None:
    status, out, _ = baton("upgrade", "-c", "config.yaml", "--set", "decode.kv_blocks=17")
    assert status == 0
    assert "all workers run" not in out
    assert "Not all are ready, as `baton status` shows: decode-4 is starting (no room)" in out
    assert recorded().config["decode"]["kv_blocks"] == 17


def test_a_reload_while_workers_start_keeps_the_new_configuration(baton, config: Path, tmp_path: Path) -> None:
    (tmp_path / "settle").touch()
    write_upgrade_request(
        UpgradeRequest(ConfigSource(str(config), ("engine.threads=1",)).read().to_dict(), None, ("engine.threads=1",))
    )
    hang_up(recorded())
    _until(lambda: recorded().config["engine"]["threads"] == 1)
    assert recorded().upgrade.outcome is None
    assert baton("reload")[0] == 0
    (tmp_path / "settle").unlink()
    _until(lambda: recorded().upgrade.outcome is not None)
    assert recorded().config["engine"]["threads"] == 1


def test_a_dry_run_changes_nothing(baton, config: Path) -> None:
    before = recorded()
    status, out, _ = baton("upgrade", "--dry-run", "-c", "config.yaml", "--set", "engine.threads=1")
    assert (status, out.count("every worker is replaced, because of engine.threads")) == (0, 2)
    assert recorded() == before


@pytest.mark.parametrize(
    ("assignments", "texts"),
    [
        (
            ["routing.picker=random", "ray.namespace=x"],
            ["routing.picker: best_score → random; only a router", "ray.namespace: baton → x; processes that"],
        ),
        (["ray.start_timeout_s=1"], ["was refused, and nothing has changed. no node fits"]),
        (["decode.kv_blocks=13"], ["the old settings are back"]),
        (["decode.kv_blocks=-1"], ["decode.kv_blocks"]),
    ],
)
def test_a_refused_or_failed_upgrade_keeps_the_configuration(baton, config: Path, assignments, texts) -> None:
    before = recorded().config
    options = [option for text in assignments for option in ("--set", text)]
    status, _, err = baton("upgrade", "-c", "config.yaml", *options)
    assert status == 1
    for text in texts:
        assert text in err
    assert recorded().config == before


def test_a_client_that_is_interrupted_says_that_the_upgrade_goes_on(baton, config: Path, monkeypatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    Path("hold").touch()
    with monkeypatch.context() as patch:
        patch.setattr("cluster.cli.cli_upgrade.time.sleep", interrupt)
        status, _, err = baton("upgrade", "--set", "decode.kv_blocks=11")
    assert (status, "The upgrade goes on. `baton status` shows what is left of it." in err) == (130, True)
    Path("hold").unlink()
    _until(lambda: recorded().config["decode"]["kv_blocks"] == 11)


@pytest.mark.parametrize("options", [["--set", "engine.threads=1"], []], ids=["another", "back to the old one"])
def test_a_second_upgrade_is_refused_while_one_runs(baton, config: Path, options: list[str]) -> None:
    write_state(RunState(**{**_fields(recorded()), "upgrade": UpgradeProgress(1)}))
    status, _, err = baton("upgrade", "-c", "config.yaml", *options)
    assert (status, "is being upgraded already" in err) == (1, True)


def test_a_request_during_an_upgrade_is_refused_and_a_reload_is_not_mistaken_for_one(
    baton, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    new = ConfigSource(str(config), ("engine.threads=1",)).read()
    for _ in range(2):
        write_upgrade_request(UpgradeRequest(new.to_dict(), str(config), ("engine.threads=1",)))
        hang_up(recorded())
        _until(lambda: recorded().upgrade is not None)
    _until(lambda: "a second upgrade was refused, because one runs already" in recorded().upgrade.lines)
    assert baton("reload")[0] == 0
    (tmp_path / "hold").unlink()
    _until(lambda: recorded().upgrade.outcome is not None)
    assert recorded().upgrade.outcome.is_applied
    assert recorded().upgrade.number == 1


def test_one_value_changes_without_repeating_the_others(baton, tmp_path: Path) -> None:
    """The cluster was started with --set, and what another --set does not name stays."""
    options = ["--set", "engine.threads=1", "--set", "decode.workers=2"]
    assert baton("up", "--detach", "-c", "config.yaml", *options)[0] == 0
    out = baton("upgrade", "--set", "decode.kv_blocks=64")[1]
    assert out.splitlines()[0] == "decode.kv_blocks: null → 64"
    assert "engine.threads" not in out
    running = recorded().config
    assert (running["engine"]["threads"], running["decode"]["workers"], running["router"]["port"]) == (1, 2, 0)
    (tmp_path / "config.yaml").write_text((tmp_path / "config.yaml").read_text() + "slo: {default: batch}\n")
    assert "restart" not in baton("reload")[1], "a reload must read the file, with all overrides"
    assert (recorded().config["slo"]["default"], recorded().config["decode"]["kv_blocks"]) == ("batch", 64)
    assert yaml.safe_load(baton("config")[1]) == {
        "model": str(tmp_path / "model"),
        "router": {"port": 0},
        "decode": {"workers": 2, "kv_blocks": 64},
        "engine": {"threads": 1},
        "slo": {"default": "batch"},
    }
    assert yaml.safe_load(baton("config", "--all")[1]) == recorded().config
    assert baton("down")[0] == 0


def test_an_upgrade_to_nothing_is_refused(baton) -> None:
    assert (baton("upgrade")[0], "give --config, --set or both" in baton("upgrade")[2]) == (2, True)


@pytest.mark.parametrize("command", [("upgrade", "-c", "config.yaml"), ("upgrade", "--set", "a=1"), ("config",)])
def test_without_a_cluster_there_is_nothing_to_upgrade_or_show(baton, command: tuple[str, ...]) -> None:
    assert "No cluster runs" in baton(*command)[2]


def _fields(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in RunState.__slots__}


def _until(condition: Any) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)

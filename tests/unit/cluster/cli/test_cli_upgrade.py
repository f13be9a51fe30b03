"""``baton upgrade``: the plan, the progress, the outcome, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from baton.client.local_cluster import (
    RunState,
    UpgradeProgress,
    UpgradeRequest,
    read_state,
    write_state,
    write_upgrade_request,
)
from cluster.cli.cli_reload import hang_up
from cluster.cli.cli_upgrade import read_configuration
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
        UpgradeRequest(read_configuration(str(config), ["engine.threads=1"]).to_dict(), None, ("engine.threads=1",))
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
        (["routing.picker=random", "ray.namespace=x"], ["routing.picker: only a router that", "ray.namespace: proces"]),
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


@pytest.mark.parametrize("options", [["--set", "engine.threads=1"], []], ids=["another", "back to the old one"])
def test_a_second_upgrade_is_refused_while_one_runs(baton, config: Path, options: list[str]) -> None:
    write_state(RunState(**{**_fields(recorded()), "upgrade": UpgradeProgress(1)}))
    status, _, err = baton("upgrade", "-c", "config.yaml", *options)
    assert (status, "is being upgraded already" in err) == (1, True)


def test_a_request_during_an_upgrade_is_refused_and_a_reload_is_not_mistaken_for_one(
    baton, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    new = read_configuration(str(config), ["engine.threads=1"])
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


def test_without_a_cluster_there_is_nothing_to_upgrade(baton) -> None:
    assert "No cluster runs" in baton("upgrade", "-c", "config.yaml")[2]


def _fields(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in RunState.__slots__}


def _until(condition: Any) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)

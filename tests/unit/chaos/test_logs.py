"""Logs of the cluster of a failed run are kept, and nothing else of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.logs import run_folder

LOGS = {"head-up.log", "baton-0/1/ray-start.log", "baton-0/1/session_1/logs/worker.out", "baton-0/1/session_1/logs/a/b"}
OTHERS = {"token", "config.yaml", "baton-0/1/session_1/node_ip_address.json", "baton-0/1.lock"}


def write_files(folder: Path) -> None:
    for name in LOGS | OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "baton-0/1/session_latest").symlink_to(folder / "baton-0/1/session_1")


def kept_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("failed", [True, False])
def test_logs_are_kept_if_the_run_fails(tmp_path: Path, failed: bool) -> None:
    kept, told = tmp_path / "chaos-logs", list[str]()
    kept.mkdir()
    (kept / "old.log").touch()
    with run_folder(kept, lambda: failed, told.append) as folder:
        write_files(folder)
    assert not folder.exists()
    assert kept_in(kept) == (LOGS if failed else set())
    assert told == ([f"The logs of the cluster's processes are in {kept}"] if failed else [])


def test_logs_are_kept_if_the_cluster_does_not_start(tmp_path: Path) -> None:
    def start() -> None:
        with run_folder(tmp_path / "kept", lambda: False, lambda _: None) as folder:
            write_files(folder)
            raise TimeoutError("the head did not start")

    with pytest.raises(TimeoutError):
        start()
    assert kept_in(tmp_path / "kept") == LOGS

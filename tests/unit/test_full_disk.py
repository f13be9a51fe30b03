"""A full disk, for everything that baton writes: serving goes on, and commands name the file and what to do."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

import baton.engine.cpu.build
from baton.bench.document import write_report
from baton.client.local_cluster import (
    RunState,
    UpgradeRequest,
    read_state,
    run_folder,
    state_file,
    write_state,
    write_upgrade_request,
)
from baton.core.errors import BatonError
from baton.engine.draft.checkpoint import write_tensors
from baton.engine.models.model_cache import ensure_folder, run_logged
from baton.train.dataset import AnswerDataset, Sample
from baton.train.training_state import TrainingState, save_state
from cluster.cli.cli_certs import create_certificates
from cluster.latency.store import FitStore
from cluster.nodes.ray_folder import RayFolder
from cluster.nodes.ray_token import ensure_token
from tests.full_disk import FILLER, fill, full_disk, why_no_mounts
from tests.unit.cluster.command_line import baton as command
from tests.unit.cluster.command_line import environment, router

__all__ = ["command", "environment", "router"]  # fixtures

FULL = "No space left on device"


@pytest.fixture
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # Ray's sockets need a short path
        if problem := why_no_mounts(Path(name)):
            pytest.skip(problem)
        with full_disk(Path(name)) as folder:
            yield folder


def make_model(folder: Path) -> None:
    def make(work: Path) -> Path:
        made = work / "made"
        made.mkdir()
        (made / "weights").write_bytes(bytes(10))
        return made

    ensure_folder(folder / "model", "test", make)


def convert_model(folder: Path) -> None:
    """As a converter in its own process, whose last words have no room in its log."""
    script = f"open({str(folder / 'weights')!r}, 'wb', buffering=0).write(bytes(10))"

    def make(work: Path) -> Path:
        run_logged([sys.executable, "-c", script], work / "log", {})
        return work

    ensure_folder(folder / "model", "test", make)


def report(folder: Path) -> None:
    write_report({"a": 1}, folder / "report.json", "the table", Console(quiet=True))


def token(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "token"))
        patch.delenv("RAY_AUTH_TOKEN", raising=False)
        ensure_token()


def answers(folder: Path) -> None:
    AnswerDataset(folder / "answers", {}).append([Sample(tuple(range(100)), 10)])


def training_state(folder: Path) -> None:
    save_state(folder / "state.pt", {}, TrainingState(), {"weights": torch.zeros(50_000)})


WRITERS: dict[str, Callable[[Path], object]] = {
    "a model in the cache": make_model,
    "a converted model": convert_model,
    "a report": report,
    "Ray's token": token,
    "Ray's folder": RayFolder,
    "certificates": lambda folder: create_certificates(folder / "certs", ["node-1"], 1),
    "a checkpoint": lambda folder: write_tensors({"a": torch.zeros(50_000)}, folder / "model.safetensors"),
    "training data": answers,
    "the state of a training": training_state,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_an_error_names_the_place_and_leaves_no_half_file(disk: Path, write: Callable[[Path], object]) -> None:
    with pytest.raises(BatonError) as raised:
        write(disk)
    assert str(disk) in raised.value.message
    assert any(word in raised.value.message for word in ("Free some", "Set ", "The table above"))
    if write not in (training_state, WRITERS["a checkpoint"]):  # torch has its own words
        assert FULL in raised.value.message
    left = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size and path.name != FILLER]
    assert left == []


RECORDS = {
    "the record of a run": (lambda: write_state(RunState.of_this_process({})), "cluster.json"),
    "a request for an upgrade": (lambda: write_upgrade_request(UpgradeRequest({}, None, ())), "upgrade.json"),
}


@pytest.mark.parametrize(("write", "name"), RECORDS.values(), ids=RECORDS.keys())
def test_a_record_on_a_full_disk_is_an_error(
    disk: Path, write: Callable[[], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(disk))
    with pytest.raises(
        BatonError,
        match=rf"{disk}/run/{socket.gethostname()}/{name} cannot be written: {FULL}.*set BATON_RUN or BATON_CACHE",
    ):
        write()


def test_renewing_certificates_keeps_the_old_ones(disk: Path) -> None:
    (disk / FILLER).unlink()
    create_certificates(disk / "certs", ["node-1"], 1)
    before = {path: path.read_bytes() for path in (disk / "certs").rglob("*.*")}
    fill(disk)
    with pytest.raises(BatonError, match="cannot be written"):
        create_certificates(disk / "certs", ["node-1"], 1)
    assert {path: path.read_bytes() for path in (disk / "certs").rglob("*.*")} == before


def test_latencies_are_forgotten_with_one_warning(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FitStore(disk / "latency")
    for _ in range(3):
        store.save(("kind",), [1.0] * 6)
    [line] = caplog.messages
    assert f"the latency model cannot be stored in {disk / 'latency'}" in line
    assert FULL in line
    (disk / FILLER).unlink()
    store.save(("kind",), [1.0] * 6)
    assert store.load(("kind",)) == (1.0,) * 6


def test_the_cpu_decoder_is_compiled_without_being_kept(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numba = pytest.importorskip("numba")
    with monkeypatch.context() as patch, baton.engine.cpu.build._kept_in(disk, numba, ".lock") as is_kept:
        assert is_kept
        patch.setattr(baton.engine.cpu.build, "_SIGNATURE", "int64(int64)")
        compiled = baton.engine.cpu.build._compile(numba, _next, disk)
    assert compiled.ctypes(41) == 42
    assert f"cannot be stored in {disk} ([Errno 28] {FULL})" in caplog.text


def _next(number: int) -> int:
    return number + 1


@pytest.mark.parametrize("detached", [True, False])
def test_a_cluster_does_not_start_without_a_record(
    command: Callable[..., tuple[int, str, str]], disk: Path, monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(disk))
    status, _, err = command("up", "-c", "config.yaml", *(["--detach"] if detached else []))
    assert status == 1
    assert "Traceback" not in err
    full = run_folder() if detached else state_file()  # the log of a detached one has no room to say so
    assert f"{full} cannot be written: {FULL}. Free some space there, or set BATON_RUN or BATON_CACHE" in err


def test_a_running_cluster_survives(
    command: Callable[..., tuple[int, str, str]], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log and its record are on the disk, and it is told to reload its configuration."""
    (disk / FILLER).unlink()
    monkeypatch.setenv("BATON_CACHE", str(disk))
    assert command("up", "--detach", "-c", "config.yaml")[0] == 0
    state = read_state()
    assert state is not None
    try:
        fill(disk)
        status, _, err = command("reload", "--timeout", "2")
        assert status == 1
        assert "has not reloaded its configuration after 2 s, or could not record it" in err
        assert state.is_running()
        (disk / FILLER).unlink()
        assert command("reload")[0] == 0
        log = (run_folder() / "baton.log").read_text()
        assert log.count(f"other commands do not see this change: {state_file()} cannot be written: {FULL}") == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.pid, signal.SIGTERM)
        command("down")


@pytest.mark.parametrize("arguments", [("version",), ("status", "--json"), ("model", "pull", "model")])
def test_output_to_a_full_disk_is_an_error(disk: Path, router: object, arguments: tuple[str, ...]) -> None:
    environment = {**os.environ, "BATON_ENDPOINT": router.endpoint}  # type: ignore[attr-defined]
    with (disk / "output").open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "cluster.cli.cli", *arguments],
            stdout=output, stderr=subprocess.PIPE, env=environment, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode != 0
    assert FULL in done.stderr
    assert "Traceback" not in done.stderr


def test_lines_of_a_log_on_a_full_disk_end_nothing(disk: Path) -> None:
    with (disk / "log").open("w") as stream:
        handler = logging.StreamHandler(stream)
        logger = logging.Logger("test")
        logger.addHandler(handler)
        logger.error("lost")
        (disk / FILLER).unlink()
        logger.error("kept")
    assert "kept" in (disk / "log").read_text()

"""Fits on disk: what was saved comes back, and what is broken costs a warning only."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cluster.latency.store import FitStore

KIND = ("model", "decode", "cpu", "bfloat16", "2")
COEFFICIENTS = (14.0, 1.1, 3e-4, 0.8, 5e-4, 1.0)


def test_a_fit_is_loaded_only_for_its_kind(tmp_path: Path) -> None:
    store = FitStore(tmp_path / "latency")
    assert store.load(KIND) == ()
    store.save(KIND, COEFFICIENTS)
    assert FitStore(tmp_path / "latency").load(KIND) == COEFFICIENTS
    assert store.load((*KIND[:-1], "4")) == ()
    assert [file.suffix for file in (tmp_path / "latency").iterdir()] == [".json"]  # nothing temporary is left


def test_the_default_folder_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    FitStore().save(KIND, COEFFICIENTS)
    assert list((tmp_path / "latency").glob("*.json"))


def test_a_zero_coefficient_can_grow_again(tmp_path: Path) -> None:
    store = FitStore(tmp_path)
    store.save(KIND, (14.0, 0.0, 0.0, 0.8, 0.0, 1.0))
    assert min(store.load(KIND)) > 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        json.dumps({"version": 99, "kind": list(KIND), "coefficients": COEFFICIENTS}).encode(),
        json.dumps({"version": 1, "kind": ["another"], "coefficients": COEFFICIENTS}).encode(),
        json.dumps({"version": 1, "kind": list(KIND)}).encode(),
        json.dumps({"version": 1, "kind": list(KIND), "coefficients": [1.0]}).encode(),
        json.dumps({"version": 1, "kind": list(KIND), "coefficients": None}).encode(),
        json.dumps({"version": 1, "kind": list(KIND), "coefficients": [float("nan")] * 6}).encode(),
        json.dumps({"version": 1, "kind": list(KIND), "coefficients": [-1.0] * 6}).encode(),
        json.dumps({"version": 1, "kind": list(KIND), "coefficients": [0.0] * 6}).encode(),
        json.dumps({"version": 1, "kind": list(KIND), "coefficients": [10**400] * 6}).encode(),
    ],
)
def test_a_broken_file_is_ignored_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = FitStore(tmp_path)
    store.save(KIND, COEFFICIENTS)
    [file] = tmp_path.glob("*.json")
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert store.load(KIND) == ()
    assert str(file) in caplog.text


def test_an_unwritable_folder_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        FitStore(tmp_path / "file").save(KIND, COEFFICIENTS)
    assert "cannot be stored" in caplog.text

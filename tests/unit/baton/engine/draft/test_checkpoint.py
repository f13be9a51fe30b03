"""Reading checkpoint files: every way in which one can be missing or broken is said."""

from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.core.errors import ConfigError
from baton.engine.draft.checkpoint import fingerprint, read_tensors, write_tensors
from baton.engine.draft.checkpoint_files import find_checkpoint, read_config


class _Exploit:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('code from a checkpoint ran')",)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    for reference in (tmp_path / "none", str(tmp_path / "none"), "no folder and no hub id"):
        with pytest.raises(ConfigError, match=r"does not exist\. .* Correct the path"):
            find_checkpoint(reference)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"is a file, not a folder\. Expected a folder with config\.json"):
        find_checkpoint(tmp_path / "model.safetensors")


def test_an_unreachable_hub_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr("baton.engine.draft.checkpoint_files.snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"owner/head .* no route\nCorrect the path or the name, check the network"):
        find_checkpoint("owner/head")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"has no config\.json\. Give a folder that contains it"),
        (
            "{",
            r"could not be read, because it is not JSON: .*\. Correct it if it was edited; otherwise, copy or download",
        ),
        ("[]", "a list"),
    ],
)
def test_a_config_that_is_not_an_object_is_refused(content: str | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        read_config(tmp_path)


def test_missing_weights_are_refused_with_the_expected_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights.*model\.safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 50])
def test_a_file_that_is_not_a_checkpoint_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="could not be read"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused(name: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / name, {"x": torch.ones(1000)}
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"could not be read(.|\n)*Copy or download the checkpoint again\.$"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_written_file_has_the_default_mode(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_tensors({"x": torch.ones(3)}, tmp_path / "x.safetensors", {"format": "pt"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == mode
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_no_code_in_a_pickle_is_executed(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": _Exploit()}, protocol=2))
    with pytest.raises(ConfigError, match="could not be read"):
        read_tensors(tmp_path)


def test_a_file_with_unexpected_objects_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1), "step": 7}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="named tensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (None, "no weight_map"),
        ({"x": "absent.safetensors"}, "'absent.safetensors'"),
        ({"x": "../outside.safetensors"}, "not in the same folder"),
        ({"x": "part.safetensors", "y": "part.safetensors"}, "do not contain: y"),
    ],
    ids=["no map", "missing shard", "outside", "missing tensor"],
)
def test_an_inconsistent_index_is_refused(weight_map: Any, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    save_file({"x": torch.ones(1)}, folder / "part.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=reason):
        read_tensors(folder)


def test_fingerprints_depend_on_every_value_name_shape_dtype_and_setting() -> None:
    base = {"x": torch.arange(6.0)}
    one_bit = {"x": torch.arange(6.0)}
    one_bit["x"][5] += 1e-6
    variants = [
        ({}, base),
        ({}, one_bit),
        ({}, {"y": base["x"]}),
        ({}, {"x": base["x"].view(2, 3)}),
        ({}, {"x": base["x"].bfloat16()}),
        ({"norm": True}, base),
        ({}, {}),
    ]
    assert len({fingerprint(settings, tensors) for settings, tensors in variants}) == len(variants)
    assert fingerprint({}, {"x": torch.arange(6.0)}) == fingerprint({}, base)

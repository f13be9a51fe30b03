"""Where the program cannot be compiled or kept, the engine goes on without it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numba
import numpy as np
import pytest
import torch

import baton.engine.cpu.build
from baton.core.errors import NotFusableError
from baton.core.progress import progress_to
from baton.engine.cpu.arithmetic import add_row, floats, scale_row
from baton.engine.cpu.build import _kept_in, load_program
from baton.engine.cpu.whole_program import compiled_as_a_whole
from tests.engine_runs import build_engine, build_runner, run_tokens
from tests.tiny_models import model_with_reference, random_prompts

PROMPTS = random_prompts([5, 19])


def test_transformers_computes_the_same_without_numba(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def import_all_but_numba(name: str) -> ModuleType:
        if name == "numba":
            raise ImportError("No module named 'numba'")
        return import_module(name)

    monkeypatch.setattr(baton.engine.cpu.build, "import_module", import_all_but_numba)
    load_program.cache_clear()
    model, expected = model_with_reference("llama", PROMPTS, 8)
    try:
        with caplog.at_level(logging.INFO):
            runner = build_runner(model)
        assert not runner.is_fused
        assert "No module named 'numba'" in caplog.text
        assert run_tokens(build_engine(runner), PROMPTS, 8) == expected
        with pytest.raises(NotFusableError, match="numba cannot be used"):
            build_runner(model, decoder="fused")
    finally:
        load_program.cache_clear()


def test_an_unwritable_cache_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with _kept_in(tmp_path / "file" / "kernels", numba, ".lock") as is_kept:
        assert not is_kept
    assert "BATON_CACHE" in caplog.text


def test_numba_keeps_its_own_cache_for_others(tmp_path: Path) -> None:
    before = numba.config.CACHE_DIR
    with _kept_in(tmp_path / "kernels", numba, ".lock") as is_kept:
        meanwhile = numba.config.CACHE_DIR
    assert is_kept
    assert meanwhile == str(tmp_path / "kernels")
    assert before == numba.config.CACHE_DIR


def test_needing_one_program_does_not_wait_for_compiling_another(tmp_path: Path) -> None:
    acquired: list[bool] = []

    def other() -> None:
        with _kept_in(tmp_path, numba, ".other.lock") as is_kept:
            acquired.append(is_kept)

    with _kept_in(tmp_path, numba, ".one.lock"):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(30)
        assert acquired == [True]


def test_a_program_is_loaded_once() -> None:
    assert load_program(torch.float32) is load_program(torch.float32)


def _scale(address: int, count: int) -> None:
    scale_row(floats(address, count), np.float32(2))


def _double_in_place(address: int, count: int) -> None:
    add_row(floats(address, count), floats(address, count))


@numba.njit
def _double(values: np.ndarray) -> None:
    scale_row(values, np.float32(2))


def test_a_function_of_a_whole_program_can_still_be_called_on_its_own() -> None:
    with compiled_as_a_whole(lambda done, of: None):
        program = numba.cfunc("void(int64, int64)")(_scale)
    values = np.arange(40, dtype=np.float32)
    program.ctypes(values.ctypes.data, values.size)
    scale_row(values, np.float32(2))
    _double(values)
    assert (values == 8 * np.arange(40, dtype=np.float32)).all()


def test_progress_is_reported_only_while_a_program_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def import_small_program(name: str) -> ModuleType | SimpleNamespace:
        return SimpleNamespace(serve_float32=_double_in_place) if name.endswith("cpu.program") else import_module(name)

    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(baton.engine.cpu.build, "import_module", import_small_program)
    lines: list[str] = []
    values = np.arange(40, dtype=np.float32)
    try:
        for _ in range(2):
            load_program.cache_clear()
            with progress_to(lines.append):
                load_program(torch.float32)(values.ctypes.data, values.size)
    finally:
        load_program.cache_clear()
    assert (values == 4 * np.arange(40, dtype=np.float32)).all()  # once compiled, once loaded
    (line,) = lines
    assert line.startswith("compiling the CPU decoder, once on this machine [")


def test_a_program_can_be_compiled_after_its_compiler_was_killed(tmp_path: Path) -> None:
    hold = (
        "import sys, time, numba, pathlib\nfrom baton.engine.cpu.build import _kept_in\n"
        "with _kept_in(pathlib.Path(sys.argv[1]), numba, '.lock'):\n"
        "    print('held', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None
        assert compiler.stdout.readline() == b"held\n"
        lines: list[str] = []

        def kill(line: str) -> None:
            lines.append(line)
            compiler.kill()

        with progress_to(kill), _kept_in(tmp_path, numba, ".lock") as is_kept:
            assert is_kept
    assert lines == ["another process compiles the CPU decoder; waiting for it"]

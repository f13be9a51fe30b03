"""Where the program cannot be compiled or kept, the engine goes on without it."""

from __future__ import annotations

import logging
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numba
import pytest
import torch

import baton.engine.cpu.build
from baton.core.errors import NotFusableError
from baton.engine.cpu.build import _kept_in, load_program
from tests.engine_runs import build_engine, build_runner, run_tokens
from tests.tiny_models import model_with_reference, random_prompts

PROMPTS = random_prompts([5, 19])


def test_without_numba_transformers_computes_the_same(
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


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_whoever_needs_one_program_does_not_wait_for_another_to_be_compiled(tmp_path: Path) -> None:
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

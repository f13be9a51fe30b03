"""Errors keep their class on the way from one process to another."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.core.errors import error_classes


@pytest.mark.parametrize("code", ["model_unavailable", "unsupported_model", "context_length_exceeded"])
def test_an_error_is_rebuilt_without_importing_its_module(code: str) -> None:
    program = f"from baton.core.errors import rebuild_error; print(type(rebuild_error({code!r}, 'm')).__name__)"
    rebuilt = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert rebuilt.strip() == error_classes()[code].__name__ != "InternalError"

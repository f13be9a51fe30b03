"""Triton's kernels in its interpreter, on the CPU, beside whatever else uses Triton in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_OURS = (
    "engine.attention.triton_kernels",
    "engine.attention.triton_paged",
    "engine.attention.triton_probe",
    "engine.fp8_kernels",
)
_SWITCH = "TRITON_INTERPRET"


@contextmanager
def interpreted_triton() -> Iterator[None]:
    """Within it, imports of Triton and of what is made with it yield modules whose kernels are interpreted.

    A kernel becomes an interpreted one when it is decorated, and Triton decorates its own library when it is imported.
    Torch has often imported it by then, so that both must be imported anew; afterwards what was there before is back.
    """
    before = _loaded()
    switch = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    _forget(before)
    try:
        yield
    finally:
        _forget(_loaded())
        sys.modules.update(before)
        if switch is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = switch


def _forget(modules: Iterable[str]) -> None:
    for name in modules:
        del sys.modules[name]
        package, _, child = name.rpartition(".")
        if package in sys.modules:  # which remembers what was imported from it
            vars(sys.modules[package]).pop(child, None)


def _loaded() -> dict[str, object]:
    """The native library aside, of which there can be only one."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name in _OURS or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
    }

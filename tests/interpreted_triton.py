"""Runs Triton's kernels in its interpreter on the CPU, without affecting other uses of Triton in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

_OURS = (
    "baton.engine.attention.triton_kernels",
    "baton.engine.attention.triton_paged",
    "baton.engine.attention.triton_probe",
    "baton.engine.models.fp8_kernels",
)
_SWITCH = "TRITON_INTERPRET"


@contextmanager
def interpreted_triton() -> Iterator[None]:
    """In this context, imports of Triton and of baton's kernels yield modules whose kernels are interpreted.

    A kernel is made interpreted when it is decorated, and Triton decorates its own library at import. Torch has often
    imported it before, so both are imported anew; the previous modules are restored afterwards.
    """
    before = _loaded()
    switch = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    _replace(before, {})
    try:
        yield
    finally:
        _replace(_loaded(), before)
        if switch is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = switch


def _replace(old: Mapping[str, ModuleType], new: Mapping[str, ModuleType]) -> None:
    """Removes modules from ``sys.modules`` and adds others.

    The attributes of remaining packages are updated; removed packages keep theirs, for their restoration.
    """
    for name in old:
        del sys.modules[name]
    sys.modules.update(new)
    for name in {*old, *new}:
        package, _, child = name.rpartition(".")
        if package in old or package in new or package not in sys.modules:
            continue
        if name in new:
            setattr(sys.modules[package], child, new[name])
        else:
            vars(sys.modules[package]).pop(child, None)


def _loaded() -> dict[str, ModuleType]:
    """The loaded modules of Triton and baton's kernels, without the native library, which can be loaded only once."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name in _OURS or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
    }

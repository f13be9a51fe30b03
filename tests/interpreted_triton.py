"""Triton's kernels in its interpreter, on the CPU, beside whatever else uses Triton in this process."""

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
    """Within it, imports of Triton and of what is made with it yield modules whose kernels are interpreted.

    A kernel becomes an interpreted one when it is decorated, and Triton decorates its own library when it is imported.
    Torch has often imported it by then, so that both must be imported anew; afterwards what was there before is back.
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
    """Takes modules out of this process's table and puts others in.

    A package that stays remembers what was imported from it. One that goes keeps what it knows, for its return.
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
    """The native library aside, of which there can be only one."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name in _OURS or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
    }

"""What a part of a device run is, what it is given, and the table of all parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

Row = Mapping[str, Any]
"""One result. ``name`` says of what; ``ok`` is true or false where something was checked, and missing where something
was measured; every other key is a figure, with its unit in the key (``ms``, ``gb_per_s``)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a part runs on.

    Attributes:
        device: CUDA, or the CPU, where every part computes the same with what there is.
        shape: ``llama-3.1-8b`` at full size, or ``tiny``, which takes seconds on a CPU.
        seed: of everything random.
    """

    device: torch.device
    shape: str
    seed: int = 0

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are for a test of the part itself."""
        return self.shape == "tiny"

    @property
    def device_name(self) -> str:
        """The card's own name, or ``cpu``."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


Run = Callable[[Setting], Iterator[Row]]
"""Yields each result as soon as it is known. Whatever it raises fails the part; what it yielded before is kept."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module ``benchmarks.device_run.<module>`` with a function ``run``, executed in a process of its own.

    Attributes:
        limit_s: the process is ended after so many seconds.
        title: for people.
    """

    name: str
    limit_s: float
    title: str
    module: str

    def load(self) -> Run:
        """Imports the part; only its own process does."""
        return cast(Run, importlib.import_module(f"benchmarks.device_run.{self.module}").run)


PARTS = (
    Part("ceilings", 20, "what the device reads and multiplies", "ceilings_part"),
    Part("kernels", 70, "attention and quantization against float64", "kernels_part"),
    Part("sanitizer", 30, "attention under compute-sanitizer", "sanitizer_part"),
)
"""In the order in which they run. The limits add up to the default budget."""

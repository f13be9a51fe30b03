"""A part of a device run, its setting, and the table of all parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

Row = Mapping[str, Any]
"""One result. ``name`` says what was measured; every other key is a figure with its unit (``ms``, ``gb_per_s``).

Some keys have a special meaning:

* ``ok``: the verdict of a check; measurements have none. A row with a false verdict fails its part. A long table shows
  the number of right rows instead of the rows.
* ``not_run``: why nothing was checked or measured. A part with no other rows counts as not run.
* ``met``: whether a target was reached; false is counted and does not fail the part.
* ``hidden``: true omits the row from the printed table but not from the report.
* ``error``, ``traceback``, ``log``: why a check or a part failed.

``run``, ``part``, ``device`` and ``at`` are added to every row.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, the model's shape and the seed of a part.

    Attributes:
        device: CUDA, or the CPU, where every part runs with the available implementations.
        shape: ``llama-3.1-8b`` in full size, or ``tiny``, which takes seconds on a CPU.
        seed: seed of all random numbers.
    """

    device: torch.device
    shape: str
    seed: int = 0

    @property
    def is_tiny(self) -> bool:
        """Whether the sizes are those of a test of the part itself."""
        return self.shape == "tiny"

    @property
    def device_name(self) -> str:
        """The card's own name, or ``cpu``."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


def device_named(kind: str) -> torch.device:
    """``cpu``, or the first visible GPU for ``cuda``: some functions of torch refuse a GPU without a number."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


Run = Callable[[Setting], Iterator[Row]]
"""Yields each result as soon as it is known. An exception fails the part; the results before it are kept."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module ``benchmarks.device_run.<module>`` with a function ``run``, executed in its own process.

    Attributes:
        limit_s: seconds after which the process and its children are killed.
        title: title of the part's table.
        needs: names of parts that must run before it in the same run.
    """

    name: str
    limit_s: float
    title: str
    module: str
    needs: tuple[str, ...] = ()

    def load(self) -> Run:
        """Imports the part. Call this only in the part's own process."""
        return cast(Run, importlib.import_module(f"benchmarks.device_run.{self.module}").run)


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
    "small": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
"""Shapes of the measured models: arguments of transformers' ``LlamaConfig``."""

PARTS = (
    Part("ceilings", 12, "what the device copies, reads and multiplies", "ceilings_part"),
    Part("kernels", 70, "attention and quantization against float64", "kernels_part"),
    Part("sanitizer", 40, "attention under compute-sanitizer", "sanitizer_part"),
    Part("models", 80, "whole tiny models give the same tokens in every way", "models_part"),
    Part("kv_copies", 25, "KV copies during running steps", "copies_part"),
    Part("steps", 110, "steps of a model of random weights", "steps_part"),
    Part("tiles", 35, "attention by the layout of its programs", "tiles_part"),
    Part("drafts", 25, "drafting and choosing tokens", "drafts_part"),
    Part("end_to_end", 30, "requests through the engine", "end_to_end_part"),
    Part("others", 53, "fp8, a compiled layer, transformers' continuous batching", "others_part"),
)
"""The parts in order of execution. Their limits add up to the default budget."""

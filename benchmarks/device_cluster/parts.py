"""The checks and measurements: tokens with every KV path, then speed with the default path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.device_run.part import Part, Run

KV_PATHS: Mapping[str, dict[str, Any]] = {
    "shared_memory": {"shared_memory": "auto"},
    "connections": {"shared_memory": "off", "connections": 4},
    "messages": {"shared_memory": "off", "connections": 0},
    "nixl": {"transport": "nixl", "shared_memory": "off"},
}
"""The section ``kv_transfer`` of the configuration for each path."""


_ALONE = "alone"


@dataclass(frozen=True, slots=True)
class ClusterPart(Part):
    """A function of :mod:`benchmarks.device_cluster.checks` that runs in its own process.

    Attributes:
        module: name of the function.
        folder: folder with the models and the tokens of the engine alone, shared by the parts of a run.
    """

    folder: Path = field(default_factory=Path)

    def load(self) -> Run:
        """Imports the checks and returns the part's function."""
        checks = import_module("benchmarks.device_cluster.checks")  # imports Ray, which listing the parts must not need
        return partial(getattr(checks, self.module), self)


def cluster_parts(folder: Path) -> tuple[Part, ...]:
    """All parts in order, the most important first, in case the budget runs out.

    Args:
        folder: shared by all parts.
    """
    needs = (_ALONE,)
    default, *others = (
        ClusterPart(name, 150, f"tokens of a 1 + 1 cluster, KV by {name}", "compare_tokens", needs, folder)
        for name in KV_PATHS
    )
    return (
        ClusterPart(_ALONE, 120, "models, and tokens of the engine alone", "answer_without_cluster", (), folder),
        default,
        ClusterPart("speed", 180, "speed of a 1 + 1 cluster", "measure_speed", needs, folder),
        *others,
    )

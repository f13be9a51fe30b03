"""With this folder on ``PYTHONPATH``, Python's start-up makes baton blind: to measure what being seen costs.

Steps are not noted for timelines, timelines are not kept, no counter counts and no histogram observes. Whatever the
latency model and the scheduler live on stays. See "What it costs" in ``docs/observability.md``.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def _nothing(*_: object, **__: object) -> None:
    pass


def _blind_prometheus(module: ModuleType) -> None:
    module.Counter.inc = _nothing
    module.Histogram.observe = _nothing
    for name in ("inc", "dec", "set"):
        setattr(module.Gauge, name, _nothing)


def _blind_client(module: ModuleType) -> None:
    module.WorkerClient.record_steps = _nothing
    module.WorkerClient.record_parts = _nothing


def _blind_store(module: ModuleType) -> None:
    module.TimelineStore.add = _nothing


def _blind_engine(module: ModuleType) -> None:
    vars(module)["add_share"] = _nothing


_BLINDED: dict[str, Callable[[ModuleType], None]] = {
    "prometheus_client.metrics": _blind_prometheus,
    "cluster.registry.worker_client": _blind_client,
    "baton.explain.timelines": _blind_store,
    "baton.engine.engine": _blind_engine,
}


class _Blinder(importlib.abc.MetaPathFinder):
    """Finds the modules above as everybody does, and changes them once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        blind = _BLINDED.pop(fullname, None)
        if blind is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, blind)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, blind: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._blind = blind

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._blind(module)


sys.meta_path.insert(0, _Blinder())

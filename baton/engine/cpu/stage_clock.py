"""Measures the stages of a forward."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.engine.cpu.program import num_phases
from baton.engine.cpu.tables import Stage


class StageClock:
    """End times of the last forward's stages, as its leading thread saw them."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._moments = np.zeros((1 + int(num_phases.py_func(num_layers)), 2), dtype=np.int64)

    @property
    def address(self) -> int:
        """Address that the program writes to, see :attr:`baton.engine.cpu.tables.Step.CLOCK`."""
        return int(self._moments.ctypes.data)

    def stage_ms(self) -> dict[Stage, float]:
        """Milliseconds of each stage, over all layers."""
        taken_ms: npt.NDArray[np.float64] = np.diff(self._moments[:, 0] * 1e3 + self._moments[:, 1] / 1e6)
        num_inner = self._num_layers * Stage.FEATURES
        of_layers = taken_ms[:num_inner].reshape(self._num_layers, Stage.FEATURES).sum(axis=0)
        return dict(zip(Stage, [*of_layers.tolist(), *taken_ms[num_inner:].tolist()], strict=True))

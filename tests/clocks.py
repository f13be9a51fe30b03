"""Clocks of processes that a test can set: those of a cluster whose programs got :meth:`Clocks.variables`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Clocks:
    """The time of day of Python processes; see ``tests/jumping_clock``.

    Attributes:
        folder: has a file for each process whose clock has jumped.
    """

    folder: Path

    def variables(self) -> dict[str, str]:
        """The environment of programs whose clocks can be set."""
        paths = [str(_ROOT / "tests" / "jumping_clock"), str(_ROOT)]
        return {"BATON_TEST_CLOCKS": str(self.folder), "PYTHONPATH": os.pathsep.join(paths)}

    def jump(self, pid: int, seconds: int) -> None:
        """Lets the clock of a process differ by ``seconds`` from now on."""
        written = self.folder / f"{pid}.new"
        written.write_text(str(seconds))
        written.rename(self.folder / str(pid))

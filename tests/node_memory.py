"""The memory of a node as Ray sees it, which a test fills without using any: the files of a control group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = "/sys/fs/cgroup"
_RUN = f'mount --bind "$0" {_CGROUP} && exec "$@"'


@dataclass(frozen=True)
class NodeMemory:
    """A control group (version 2) with half of this machine's memory.

    Attributes:
        folder: has its files.
    """

    folder: Path

    def use(self, share: float) -> None:
        """Sets how much of the memory is in use."""
        self.folder.mkdir(exist_ok=True)
        total = psutil.virtual_memory().total // 2  # Ray ignores a group that has more than the machine
        used = int(share * total)
        counters = {"anon": used, "shmem": 0, "active_file": 0, "inactive_file": 0, "swapcached": 0}
        self._write("memory.max", f"{total}\n")
        self._write("memory.swap.max", "0\n")
        self._write("memory.swap.current", "0\n")
        self._write("memory.stat", "".join(f"{name} {value}\n" for name, value in counters.items()))
        self._write("memory.current", f"{used}\n")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """A command line that runs ``arguments`` in this group."""
        return ["unshare", "--mount", "sh", "-c", _RUN, str(self.folder), *arguments]

    def why_not(self) -> str:
        """Why no program can run in this group here; empty if one can."""
        if os.geteuid():
            return "the files of a control group can only be replaced by root"
        done = subprocess.run(self.command(["true"]), capture_output=True, text=True, timeout=30, check=False)
        return f"the files of a control group cannot be replaced here: {done.stderr.strip()}" if done.returncode else ""

    def _write(self, name: str, text: str) -> None:
        written = self.folder / f"{name}.new"
        written.write_text(text)
        written.rename(self.folder / name)

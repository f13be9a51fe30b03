"""The number of CPU cores that this process may use, which in a container is often not all of the machine's."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Number of cores in the affinity mask, limited by the quota of CPU time, rounded up; at least 1.

    Args:
        cgroups: mount point of cgroup v2.
        own_cgroup: file with the groups of this process.
    """
    has_mask = hasattr(os, "sched_getaffinity")  # on Linux
    cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(cgroups, own_cgroup)]))


def _quotas(cgroups: Path, own_cgroup: Path) -> list[int]:
    """Quotas, in cores, of the process's group and its ancestors; empty without limits or without cgroup v2."""
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:
        if not line.startswith("0::/"):  # cgroup v1
            continue
        group = cgroups / line.removeprefix("0::/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(cgroups) and (quota := _quota(folder / "cpu.max")) is not None:
                quotas.append(quota)
    return quotas


def _quota(path: Path) -> int | None:
    """Parses ``"150000 100000"``, microseconds of CPU time per period in microseconds. ``"max 100000"`` is no limit."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None

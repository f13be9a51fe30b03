"""The number of usable cores is the size of the affinity mask, bounded by the quota of CPU time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.process.cores import usable_cores


@pytest.fixture(autouse=True)
def _six_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))


def usable(folder: Path, own_group: str | None, **quotas: str) -> int:
    """With these limits, by group; ``top`` is the uppermost one."""
    cgroups, own = folder / "cgroups", folder / "own"
    (cgroups / "a" / "b").mkdir(parents=True)
    for name, quota in quotas.items():
        group = {"top": cgroups, "a": cgroups / "a", "b": cgroups / "a" / "b"}[name]
        (group / "cpu.max").write_text(f"{quota}\n")
    if own_group is not None:
        own.write_text(f"4:memory:/other\n0::{own_group}\n")
    return usable_cores(cgroups, own)


@pytest.mark.parametrize(
    ("own_group", "quotas", "cores"),
    [
        (None, {"top": "100000 100000"}, 6),  # no cgroups at all
        ("/", {}, 6),
        ("/", {"top": "max 100000"}, 6),
        ("/", {"top": "200000 100000"}, 2),  # of a container
        ("/", {"top": "250000 100000"}, 3),
        ("/", {"top": "10000 100000"}, 1),
        ("/", {"top": "900000 100000"}, 6),
        ("/a/b", {"b": "max 100000", "a": "300000 100000"}, 3),  # of the group above
        ("/a/b", {"b": "400000 100000", "a": "500000 100000"}, 4),
        ("/", {"top": "nonsense"}, 6),
    ],
)
def test_the_quota_limits_the_affinity_mask(tmp_path, own_group, quotas, cores):
    assert usable(tmp_path, own_group, **quotas) == cores


def test_without_affinity_masks_the_machine_is_counted(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert usable(tmp_path, "/") == 4


def test_this_process_has_at_least_one_core():
    assert usable_cores() >= 1

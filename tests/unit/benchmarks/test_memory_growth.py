"""The memory of a router that has served for long, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.memory_growth import MemorySettings, main, measure


def test_virtual_requests_are_served_and_the_heap_is_looked_at():
    found = measure(MemorySettings(requests=40, rate=20.0, warmup=20, every=10))
    assert [sample["requests"] for sample in found["samples"]] == [10, 20, 30, 40]
    assert all(sample["heap_mib"] > 0 for sample in found["samples"])
    assert found["virtual_s"] >= 2.0


def test_without_tracing_only_resident_memory_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "memory.json"
    arguments = ["--requests", "10", "--rate", "20", "--warmup", "0", "--every", "5", "--rss-only", "--json", str(file)]
    assert main(arguments) == 0
    found = json.loads(file.read_text())
    assert [sample["heap_mib"] for sample in found["samples"]] == [0.0, 0.0]
    assert all(sample["rss_mib"] > 0 for sample in found["samples"])
    assert "virtual seconds" in capsys.readouterr().out

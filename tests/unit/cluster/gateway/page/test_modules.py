"""Runs ``modules.test.js`` with the Node.js that Playwright brings, or an installed one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from baton.core.draft_payoff import Acceptance, advise_length, payoff_curve

HERE = Path(__file__).parent
STATIC = Path(__file__).parents[5] / "cluster" / "gateway" / "page" / "static"


def node() -> str:
    spec = find_spec("playwright")
    brought = Path(spec.origin).parent / "driver" / "node" if spec is not None and spec.origin else None
    found = str(brought) if brought is not None and brought.exists() else shutil.which("node")
    if found is None:
        pytest.skip("neither Playwright nor Node.js is installed")
    return found


def evaluated(script: str, *arguments: str) -> Any:
    """What a module prints as JSON."""
    command = [node(), "--input-type=module", "--eval", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_the_rules_of_thumb_are_those_of_baton_advise() -> None:
    script = (
        "const { ruleFor } = await import(process.argv[1]);"
        "console.log(JSON.stringify([...Array(101).keys()].map((percent) => ruleFor(percent / 100).lengths)));"
    )
    found = evaluated(script, str(STATIC / "speedup.js"))
    curve = payoff_curve(Acceptance((0.7,)), 0.1)
    expected = [advise_length(percent / 100, curve).rule_of_thumb for percent in range(101)]
    assert [None if lengths is None else tuple(lengths) for lengths in found] == expected


def test_the_formula_is_that_of_baton_advise() -> None:
    shares = [percent / 100 for percent in range(0, 101, 10)]
    script = (
        "const { cliffOf, curve, peakOf } = await import(process.argv[1]);"
        "const shares = JSON.parse(process.argv[2]);"
        "const found = shares.flatMap((alpha) => shares.map((cost) => {"
        "  const points = curve(alpha, cost);"
        "  const peak = peakOf(points);"
        "  return [points.map((point) => point.speedup), peak.speedup > 1 ? peak.k : 0, cliffOf(points)?.k ?? null];"
        "}));"
        "console.log(JSON.stringify(found));"
    )
    found = iter(evaluated(script, str(STATIC / "speedup.js"), json.dumps(shares)))
    for alpha in shares:
        for cost in shares:
            curve = payoff_curve(Acceptance((alpha,)), cost)
            speedups, peak, cliff = next(found)
            assert speedups == pytest.approx(curve.speedups)
            is_flat = any(gain == pytest.approx(1.0) for gain in curve.speedups)  # rounding decides there
            assert is_flat or (peak, cliff) == (curve.peak, curve.cliff)


def test_the_modules_of_the_page(tmp_path: Path) -> None:
    for file in (*STATIC.glob("*.js"), HERE / "modules.test.js"):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')  # as <script type=module> says it to a browser
    environment = {**os.environ, "PAGE_MODULES": "."}
    command = [node(), "--test", "--test-reporter=tap", "modules.test.js"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout

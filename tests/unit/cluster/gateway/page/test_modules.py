"""Runs ``modules.test.js`` with the Node.js that Playwright brings, or an installed one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

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


def test_the_rules_of_thumb_are_those_of_baton_advise() -> None:
    script = (
        "const { ruleFor } = await import(process.argv[1]);"
        "console.log(JSON.stringify([...Array(101).keys()].map((percent) => ruleFor(percent / 100).lengths)));"
    )
    command = [node(), "--input-type=module", "--eval", script, str(STATIC / "speedup.js")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    curve = payoff_curve(Acceptance((0.7,)), 0.1)
    expected = [advise_length(percent / 100, curve).rule_of_thumb for percent in range(101)]
    assert [None if lengths is None else tuple(lengths) for lengths in json.loads(done.stdout)] == expected


def test_the_modules_of_the_page(tmp_path: Path) -> None:
    for file in (*STATIC.glob("*.js"), HERE / "modules.test.js"):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')  # as <script type=module> says it to a browser
    environment = {**os.environ, "PAGE_MODULES": "."}
    command = [node(), "--test", "--test-reporter=tap", "modules.test.js"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout

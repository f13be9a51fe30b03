"""Runs ``modules.test.js`` with the Node.js that Playwright brings, or an installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STATIC = Path(__file__).parents[5] / "cluster" / "gateway" / "page" / "static"


def node() -> str:
    spec = find_spec("playwright")
    brought = Path(spec.origin).parent / "driver" / "node" if spec is not None and spec.origin else None
    found = str(brought) if brought is not None and brought.exists() else shutil.which("node")
    if found is None:
        pytest.skip("neither Playwright nor Node.js is installed")
    return found


def test_the_modules_of_the_page(tmp_path: Path) -> None:
    for file in (*STATIC.glob("*.js"), HERE / "modules.test.js"):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')  # as <script type=module> says it to a browser
    environment = {**os.environ, "PAGE_MODULES": "."}
    command = [node(), "--test", "--test-reporter=tap", "modules.test.js"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout

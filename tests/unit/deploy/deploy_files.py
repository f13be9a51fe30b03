"""Where the files of ``deploy/`` are, and the version of Ray that all of them must name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
RAY_VERSION = re.findall(r"^ray==(.+)$", CONSTRAINTS, re.MULTILINE)[0]

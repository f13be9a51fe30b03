"""Where the files of ``deploy/`` are, and the version of Ray that all of them must name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
EVERYTHING = Path(__file__).parent / "everything"
MANIFEST_FILES = {
    "cpu": DEPLOY / "kubernetes" / "manifests" / "cpu.yaml",
    "gpu": DEPLOY / "kubernetes" / "manifests" / "gpu.yaml",
    "everything": EVERYTHING / "manifest.yaml",
}
"""What the chart renders: with its values, those for GPUs, and those that use every option."""
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
RAY_VERSION = re.findall(r"^ray==(.+)$", CONSTRAINTS, re.MULTILINE)[0]

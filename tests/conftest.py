"""Before torch is imported: tests share the machine, so waiting OpenMP threads must sleep instead of spinning."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

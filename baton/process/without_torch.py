"""Keeps torch out of processes that do not need it: routers and simulated workers."""

from __future__ import annotations

import os
import sys


def do_without_torch() -> None:
    """Hides torch from all imports in this process.

    transformers imports it even for a tokenizer, which takes three seconds of CPU while the workers start, and 260 MB.
    Does nothing if torch is loaded already.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes imports raise ModuleNotFoundError
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or transformers warns about it

"""For processes that never compute: routers, and workers that are simulated."""

from __future__ import annotations

import os
import sys


def do_without_torch() -> None:
    """For the whole process: whoever looks for torch finds none.

    transformers imports it for a mere tokenizer, wherever it is installed: three seconds of CPU while the workers
    start, and 260 MB. Where it is loaded already, nothing changes.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say that there is no such module
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or transformers says that it misses it

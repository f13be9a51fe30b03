"""What Ray runs as the router."""

from __future__ import annotations

import os
import sys

from cluster.router_host import RouterHost


class RouterActor(RouterHost):
    """The router in a process of its own: one that never loads torch."""

    def __init__(self, config: dict[str, object], port: int, controller: object) -> None:
        do_without_torch()
        super().__init__(config, port, controller)


def do_without_torch() -> None:
    """For the whole process: whoever looks for torch finds none.

    transformers imports it for a mere tokenizer, wherever it is installed: three seconds of CPU while the workers
    start, and 260 MB. Where it is loaded already, nothing changes.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say that there is no such module
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or transformers says that it misses it

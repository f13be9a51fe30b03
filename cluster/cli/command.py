"""Entry point of the console script."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Runs ``baton``. Ctrl-C while its modules are imported, which takes a second, ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a shell may have told a background job to ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.cli.cli import run

    signal.signal(signal.SIGINT, handler)
    sys.exit(run(sys.argv[1:]))

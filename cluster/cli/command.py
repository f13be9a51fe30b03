"""Entry point of the console script."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Runs ``baton``. Ctrl-C during the imports, which take a second, ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # shells make background jobs ignore the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.cli.cli import run

    signal.signal(signal.SIGINT, handler)
    sys.exit(run(sys.argv[1:]))

"""Standard output of a device run, which may go away while the run goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console


class Screen:
    """Prints to a console. What cannot be printed is told once on standard error and ends nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._warnings: set[str] = set()

    def show(self, print_to: Callable[[Console], None]) -> None:
        """Prints, unless printing has failed before."""
        if self._console.quiet:
            return
        try:
            print_to(self._console)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - rich exits where a pipe was closed
            self._console.quiet = True
            self.warn(f"Tables cannot be printed ({type(error).__name__}: {error}). The run goes on.")
            with suppress(OSError, ValueError):  # Python flushes its buffer at the end, which must not fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def warn(self, text: str) -> None:
        """Writes a line to standard error, if it is still there, unless it was written before."""
        if text in self._warnings:
            return
        self._warnings.add(text)
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

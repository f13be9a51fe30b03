"""What the command line says beside its output: on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def error_console() -> Console:
    """Made anew for each use: stderr may be another one by then."""
    return Console(stderr=True)


class Reporter:
    """Progress on stderr: one line that changes on a terminal, one line after another elsewhere."""

    def __init__(self) -> None:
        self._console = error_console()
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, line: str) -> None:
        if self._status is None:
            self._console.print(Text(line), soft_wrap=True)
        else:
            self._status.update(Text(line))
            self._status.start()

    def note(self, line: str) -> None:
        """A line that stays, above the one that changes."""
        self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()

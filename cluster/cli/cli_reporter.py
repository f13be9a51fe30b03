"""Output of the commands: progress and errors on stderr, wide tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from baton.core.errors import BatonError
from cluster.cli.cli_common import ERROR_PREFIX

_REPORT_COLUMNS = 140


def run_app(app: typer.Typer, arguments: Sequence[str], prog_name: str) -> int:
    """Runs one command and returns its exit status. A :class:`BatonError` is shown as a message without traceback."""
    try:
        app(args=list(arguments), prog_name=prog_name)
    except BatonError as error:
        error_console().print(Text(ERROR_PREFIX, style="bold red") + Text(error.message, style="red"), soft_wrap=True)
        return 1
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else 1
    return 0


def print_report(shown: RenderableType) -> None:
    """Prints tables at least 140 columns wide; a narrower terminal wraps their lines but cuts nothing off."""
    Console(width=max(Console().width, _REPORT_COLUMNS)).print(shown)


def error_console() -> Console:
    """A console on stderr, created for each use, because ``sys.stderr`` may have been replaced."""
    return Console(stderr=True)


class Reporter:
    """Progress on stderr: a line that is updated on a terminal, otherwise a sequence of lines."""

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
        """Prints a permanent line, above the line of progress."""
        self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()

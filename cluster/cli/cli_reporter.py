"""Output of the commands: progress and errors on stderr, wide tables on stdout."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from baton.core.errors import BatonError
from cluster.cli.cli_common import ERROR_PREFIX

_REPORT_COLUMNS = 140
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_app(app: typer.Typer, arguments: Sequence[str], prog_name: str) -> int:
    """Runs one command and returns its exit status.

    A :class:`BatonError` and a full disk are shown as a message without traceback.
    """
    try:
        app(args=list(arguments), prog_name=prog_name)
    except BatonError as error:
        _print_error(error.message)
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        place = error.filename or "A file or the output"
        _print_error(f"{place} cannot be written: {error.strerror}. Free some space there, and run the command again.")
        return 1
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else 1
    return 0


def _print_error(message: str) -> None:
    with suppress(OSError):
        error_console().print(Text(ERROR_PREFIX, style="bold red") + Text(message, style="red"), soft_wrap=True)


def print_report(shown: RenderableType) -> None:
    """Prints tables at least 140 columns wide; a narrower terminal wraps their lines but cuts nothing off."""
    Console(width=max(Console().width, _REPORT_COLUMNS)).print(shown)


def error_console() -> Console:
    """A console on stderr, created for each use, because ``sys.stderr`` may have been replaced."""
    return Console(stderr=True)


class Reporter:
    """Progress on stderr: a line that is updated on a terminal, otherwise a sequence of lines.

    Lines that cannot be written, as to a file on a full disk, follow as soon as there is space.
    """

    def __init__(self) -> None:
        self._console = error_console()
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, line: str) -> None:
        if self._status is None:
            self.note(line)
        else:
            self._status.update(Text(line))
            self._status.start()

    def note(self, line: str) -> None:
        """Prints a permanent line, above the line of progress."""
        with suppress(OSError):
            self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()

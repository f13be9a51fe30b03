"""``baton train``: starts the trainers, which are named by strings and imported when a command runs.

Trainers load models into this process.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from baton.core.errors import BatonError
from baton.process.stop_signals import StopSignals
from baton.process.worker_environment import become_like_a_worker
from baton.train.options import KINDS, TrainOptions
from cluster.cli.cli_reporter import print_report
from cluster.cli.settings_command import settings_command

_RUN = "baton.train.command:run"
_STOPPED = "stopped"
_STOPPED_STATUS = 130
"""The exit status that shells expect of a command that Ctrl-C ended."""

app = typer.Typer(
    help="Train drafts for speculative decoding. After an interruption, the same command resumes the training.",
    no_args_is_help=True,
)


def _train(context: typer.Context, options: TrainOptions) -> None:
    console = Console(stderr=True)
    become_like_a_worker()
    run = _load(_RUN)
    with StopSignals() as signals:
        try:
            shown = run(
                context.info_name, options, _command_line(context), signals.stop.is_set, signals.end_of_start, console
            )
        except KeyboardInterrupt:
            raise typer.Exit(_STOPPED_STATUS) from None
        except BatonError as error:
            if error.code != _STOPPED:
                raise
            console.print(Text(error.message), soft_wrap=True)
            raise typer.Exit(_STOPPED_STATUS) from None
    print_report(shown)


for _kind, _options in KINDS.items():
    app.command(_kind)(settings_command(_options, _train))


def _command_line(context: typer.Context) -> str:
    """The command line with the given options, in the order in which help lists them."""
    words = ["baton", "train", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append(parameter.opts[-1] if value else parameter.secondary_opts[-1])
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [parameter.opts[-1], str(one)]
    return shlex.join(words)


def _load(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    return function

"""The page of all commands with their arguments and options, from the parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from cluster.cli.cli import app
from tests.reference_pages.markdown import code, plain, prose, table

_HEAD = """# Command line

Every command with its arguments and options, as `--help` shows them. Commands that talk to a router find the one that
`baton up` runs on this machine; `--endpoint` or `BATON_ENDPOINT` names another one, and `BATON_API_KEY` holds the key
that it asks for. The exit status is 0, 1 after an error that a message explains, 2 for a wrong command line, and 130
after Ctrl-C.

This page is generated: `python -m tests.reference_pages`.
"""


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The command and all commands below it."""
    yield path, command
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(child, (*path, name))


def _arguments(command: Any) -> Iterator[str]:
    for one in command.params:
        if one.param_type_name == "argument":
            name = one.metavar or one.name.upper()
            yield name if one.required else f"[{name}]"


def _section(path: tuple[str, ...], command: Any) -> str:
    name = " ".join(path)
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *_arguments(command), "[OPTIONS]"])
    records = [
        one.get_help_record(context)
        for one in command.params
        if "--help" not in one.opts and one.get_help_record(context) is not None
    ]
    parts = [f"## {name}\n", prose(command.help or ""), ""]
    if not getattr(command, "commands", None):
        parts += [f"```text\n{usage}\n```", ""]
    if records:
        rows = [(code(option.replace("|", " or ")), plain(text)) for option, text in records]
        parts.append(table(["option", ""], rows))
    return "\n".join(parts)


def render() -> str:
    """The text of the page."""
    found = list(_commands(get_command(app), ("baton",)))[1:]
    return "\n".join([_HEAD, *(_section(path, command) for path, command in found)]).rstrip() + "\n"

"""``baton trace export``: the shape of a cluster's traffic as a file for ``baton bench`` and ``baton simulate``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from baton.core.files import replace_file, writing
from cluster.cli.cli_common import CaOption, EndpointOption, with_client
from cluster.cli.cli_reporter import error_console

app = typer.Typer(help="The traffic of a cluster as a trace.", no_args_is_help=True)


@app.callback()
def _trace() -> None:
    """The traffic of a cluster as a trace."""


@app.command("export")
def export(
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="File for the trace. Default: standard output.")
    ] = None,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Write the newest requests as Mooncake JSONL: times, lengths and shared prefixes, without text."""
    requests = with_client(endpoint, ca, lambda client: client.trace())
    text = "".join(json.dumps(request) + "\n" for request in requests)
    if out is None:
        sys.stdout.write(text)
        return
    with writing(out, "Give a file in a writable folder."):
        replace_file(out, text, mode=0o644)
    error_console().print(Text(f"wrote {len(requests)} requests to {out}"), soft_wrap=True)

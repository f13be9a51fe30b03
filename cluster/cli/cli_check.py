"""``baton check``: whether the workers of a configuration fit on their GPUs, before anything starts.

``baton check --nodes`` is in :mod:`cluster.cli.cli_check_nodes`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.core.errors import ConfigError, InternalError, rebuild_error
from cluster.config.fit_rows import FitRow

if TYPE_CHECKING:
    from cluster.config.config import BatonConfig

_GIB = 2**30
_SHOWN = 2000
_LIMIT_S = 120.0


def check(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="YAML configuration file. Default: the built-in defaults.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one value, such as prefill.resources.gpus=4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Check the machines of the Ray cluster (ray.address) instead.")
    ] = False,
) -> None:
    """Compute whether each pool's workers fit on their GPUs. Reads the model's config only, and starts nothing.

    With --nodes, compare the cluster's machines (versions, drivers, clocks, limits, devices), and measure their
    connections. Each problem comes with its remedy; the exit status is 1 if one prevents the cluster from working.
    """
    from cluster.config.config import load_config
    from cluster.config.config_reading import parse_override

    settings = load_config(config, dict(parse_override(text) for text in assignments or []))
    if nodes:
        from cluster.cli.cli_check_nodes import check_all_nodes

        check_all_nodes(settings, as_json=as_json)
        return
    rows = fit_rows(settings)
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        Console().print(render(settings, rows))
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def fit_rows(settings: BatonConfig) -> list[FitRow]:
    """A row for each pool, computed in a process of its own, since this one does without torch.

    Raises:
        BatonError: the model does not exist, or cannot be served or divided like this.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", "cluster.worker.fit", str(os.getpid())],
            input=json.dumps(settings.to_dict()),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"The sizes of {settings.model} were not known after {_LIMIT_S:g} s. Check the sizes in its config.json; "
            "expected those of a model whose layers can be listed in seconds."
        ) from error
    try:
        answer = json.loads(process.stdout)
    except ValueError as error:
        raise InternalError(f"the check failed: {process.stderr.strip()[-_SHOWN:]}") from error
    if "error" in answer:
        raise rebuild_error(answer["code"], answer["error"])
    return [FitRow(**row) for row in answer["rows"]]


def render(settings: BatonConfig, rows: Sequence[FitRow]) -> RenderableType:
    """A table of the pools, and a sentence for each that does not fit."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("pool", "each of", "GPU\nGiB", "weights\nGiB", "step\nGiB", "KV\nKiB/token", "KV\ntokens", "fits"):
        table.add_column(title, justify="left" if title in ("pool", "each of") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.workers} {row.pool}",
            row.hardware,
            f"{row.memory / _GIB:.1f}" if row.memory else "-",
            f"{row.weights / _GIB:.1f}",
            f"~{row.step / _GIB:.1f}",
            f"{row.kv_per_token / 1024:.0f}",
            f"{row.kv_tokens:,}" if row.memory else "-",
            Text("no", style="red") if row.problem else Text("yes" if row.memory else "-", style="green"),
        )
    first = rows[0]
    notes = [
        f"{settings.model}: {first.num_parameters / 1e9:.2f} billion parameters, {first.whole_kv_per_token / 1024:.0f} "
        "KiB of KV per token over all heads. The sizes are those of one GPU. The largest step is an estimate, which a "
        "worker replaces by a measurement. Drafts are not counted.",
        *(row.explain() for row in rows if row.problem),
    ]
    return Group(table, *(Text(note) for note in notes))

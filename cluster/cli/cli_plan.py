"""``baton plan``, ``advise`` and ``move``: the autoscaler's plan and advice, and manual role changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from baton.core.errors import ConfigError
from baton.core.figure_table import figure_table
from cluster.cli.cli_common import CaOption, EndpointOption, JsonOption, with_client
from cluster.cli.cli_drafts import assumed_drafts, render_assumed, render_drafts

_DIRECTIONS = {"up": "green", "down": "yellow", "hold": ""}


def plan(as_json: JsonOption = False, endpoint: EndpointOption = None, ca: CaOption = None) -> None:
    """Show what the autoscaler would do next and why, also while it is off."""
    answer = with_client(endpoint, ca, lambda client: client.plan())
    _show(answer, render_plan(answer), as_json=as_json)


def advise(
    as_json: JsonOption = False,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
    alpha: Annotated[
        str | None,
        typer.Option(
            metavar="A[,A...]",
            help="Without a cluster: share of draft tokens that are accepted, such as 0.7, or one for each position.",
        ),
    ] = None,
    draft_cost: Annotated[
        float | None,
        typer.Option(metavar="C", help="Without a cluster: cost of a draft token relative to a step, such as 0.15."),
    ] = None,
) -> None:
    """Advise how the same workers could serve the recent traffic better, and how long drafts should be."""
    if alpha is not None and draft_cost is not None:
        assumed = assumed_drafts(alpha, draft_cost)
        _show(assumed, render_assumed(assumed), as_json=as_json)
        return
    if alpha is not None or draft_cost is not None:
        raise ConfigError("--alpha and --draft-cost belong together: give both, or neither to ask the cluster.")
    answer = with_client(endpoint, ca, lambda client: client.advise())
    drafts = render_drafts(answer.get("speculation", ()))
    _show(answer, Group(render_advice(answer), Text(""), drafts), as_json=as_json)


def change_role(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Pool that gives up a worker: prefill or decode.")],
    destination: Annotated[str, typer.Argument(metavar="TO", help="The other pool, which gets the worker.")],
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Move a worker from one pool to the other. It drains its requests first and keeps its weights."""
    answer = with_client(endpoint, ca, lambda client: client.change_role(source, destination))
    targets = ", ".join(f"{name}: {pool['target']}" for name, pool in answer["pools"].items())
    Console().print(Text(f"{targets}; `baton status` shows when the worker has changed"), soft_wrap=True)


def render_plan(answer: Mapping[str, Any]) -> RenderableType:
    """Renders the answer of GET /admin/plan: a table of pools, and the reasons as sentences."""
    table = figure_table("pool", "now", "next", "wanted", "used", "predicted")
    for name, pool in answer["pools"].items():
        attainment = min(pool["attainment"].values(), default=None)
        bounds = answer["limits"][name]
        table.add_row(
            Text(name),
            str(pool["before"]),
            Text(str(pool["target"]), style=_DIRECTIONS.get(pool["direction"], "")),
            f"{pool['wanted']} of {bounds['min']}-{bounds['max']}",
            _percent(pool["utilisation"]),
            _percent(attainment),
        )
    texts = [text for pool in answer["pools"].values() for text in pool["texts"]]
    if not answer["enabled"]:
        texts.append("The autoscaler is off (autoscaler.enabled), so this plan is not carried out.")
    if answer["move_obstacle"]:
        texts.append(f"No worker can change its role: {answer['move_obstacle']}")
    return Group(table, Text(""), *_bullets(dict.fromkeys(texts)))


def render_advice(answer: Mapping[str, Any]) -> RenderableType:
    """Renders the answer of GET /admin/advise: the capacity of each arrangement of the workers, and the advice."""
    bullets = _bullets(answer["texts"])
    if answer["missing"]:
        return Group(*bullets)
    figures = render_figures(answer["disaggregation"]["figures"])
    table = figure_table("workers", "prefill", "decode", "local prompts", "most requests/s within SLO")
    for heading, key in (("now", "now"), ("best pools", "best"), ("aggregated", "aggregated")):
        option = answer[key]
        both = key == "aggregated"
        table.add_row(
            heading,
            "-" if both else str(option["prefill"]),
            "-" if both else str(option["decode"]),
            _percent(option["local_share"]),
            f"{option['capacity']:.3g}",
        )
    now, many = f"{answer['rate']:.3g} requests/s in the last minute or less", f"{answer['num_requests']} requests"
    seen = Text(f"observed: {now}, {many} in the last five minutes\n")
    return Group(seen, table, Text(""), *bullets, Text("\nIs disaggregation worth it here?"), figures)


def render_figures(figures: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Renders the figures behind the verdict on disaggregation."""
    table = figure_table("figure", "value", "source", num_left=1)
    for figure in figures:
        value, unit = figure["value"], figure["unit"]
        if value is None:
            shown = "cannot keep up" if unit == "ms" else "-"
        else:
            shown = _percent(value) if unit == "share" else f"{value:.3g} {unit}"
        table.add_row(figure["name"], shown, figure["source"])
    return table


def _bullets(texts: Sequence[str] | Mapping[str, Any]) -> list[Text]:
    return [Text(f"• {text}") for text in texts]


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    percent = share * 100
    return f"{percent:.0f} %" if percent >= 100 else f"{percent:.3g} %"


def _show(answer: Mapping[str, Any], rendered: RenderableType, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        Console().print(rendered)

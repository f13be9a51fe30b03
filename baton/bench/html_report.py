"""The report as one page with everything in it: no network is needed to read it. plotly comes with the extra
``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from baton.bench.charts import Chart

_TABLE_COLUMNS = 160
_CHART_HEIGHT = 360
_MAX_UNIT_TICKS = 10
"""From so many units on, plotly's own ticks are whole numbers."""
_STYLE = """
body { font-family: system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff; }
pre { font-family: ui-monospace, monospace; font-size: 0.8rem; line-height: 1.35; overflow-x: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 0.5rem; }
"""


def write_html(title: str, tables: RenderableType, charts: Sequence[Chart], file: Path) -> None:
    """The tables as they are on the terminal, and charts to zoom into."""
    from plotly.offline import get_plotlyjs

    figures = [_figure(chart).to_html(full_html=False, include_plotlyjs=False) for chart in charts]
    body = "\n".join(f"<div>{figure}</div>" for figure in figures)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<pre>{_as_html(tables)}</pre>\n<div class="charts">\n{body}\n</div>\n</body>\n</html>\n'
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")


def _figure(chart: Chart) -> Any:
    from plotly import graph_objects

    x_axis: dict[str, Any] = {"title": {"text": chart.x_label}, "type": "log" if chart.is_log_x else "linear"}
    ends = [float(end) for series in chart.series for end in (series.x.min(), series.x.max())]
    if chart.has_whole_x and max(ends) - min(ends) < _MAX_UNIT_TICKS:
        x_axis |= {"tick0": 0, "dtick": 1}
    figure = graph_objects.Figure(
        layout={
            "title": {"text": chart.title},
            "xaxis": x_axis,
            "yaxis": {"title": {"text": chart.y_label}, "rangemode": "tozero"},
            "height": _CHART_HEIGHT,
            "template": "plotly_white",
            "margin": {"l": 60, "r": 20, "t": 50, "b": 50},
        }
    )
    for series in chart.series:
        mode = "markers" if series.is_dotted else "lines"
        # Lists instead of arrays: plotly would write arrays as base64, which nobody can read in the page.
        figure.add_scatter(x=series.x.tolist(), y=series.y.tolist(), mode=mode, name=series.name, marker={"size": 4})
    return figure


def _as_html(tables: RenderableType) -> str:
    console = Console(file=StringIO(), record=True, width=_TABLE_COLUMNS, force_terminal=True, color_system="truecolor")
    console.print(tables)
    return console.export_html(inline_styles=True, code_format="{code}")

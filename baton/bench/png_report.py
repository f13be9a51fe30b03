"""The report as one picture. matplotlib comes with the extra ``bench``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.bench.charts import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_PANEL_INCHES = (5.0, 3.4)
_DPI = 110
_FEW_POINTS = 20


def write_png(title: str, charts: Sequence[Chart], file: Path) -> None:
    """All charts on one sheet."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(charts) / _COLUMNS)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * _COLUMNS, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = [panel for row in figure.subplots(rows, _COLUMNS, squeeze=False) for panel in row]
    for panel in panels[len(charts) :]:
        panel.set_axis_off()
    for panel, chart in zip(panels, charts, strict=False):
        _draw(panel, chart)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=_DPI, format="png")


def _draw(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(chart.title, fontsize="medium")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.is_log_x:
        axes.set_xscale("log")
    if chart.has_whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for series in chart.series:
        if series.is_dotted:
            axes.plot(series.x, series.y, ".", markersize=3, label=series.name)
        else:
            marker = "." if len(series.x) < _FEW_POINTS else ""
            axes.plot(series.x, series.y, linewidth=1.4, marker=marker, label=series.name)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=0)
    if chart.series:
        axes.legend(fontsize="small")

"""The speculation benchmark's results as a picture. matplotlib is optional: it comes with the extra ``bench``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.speculation_rounds import merged
from benchmarks.speculation_runs import CellResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW_TO_INSTALL = "no plot: matplotlib is missing; install it with: pip install 'baton-serve[bench]'"
_PANEL_INCHES = (4.2, 3.2)
_DPI = 120


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(results: Sequence[CellResult], file: Path) -> None:
    """Writes a PNG. A row for each temperature: speed-ups at each batch, and acceptance by position over all of them.

    Raises:
        ImportError: there is no matplotlib; see :func:`can_plot`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    temperatures = sorted({result.cell.temperature for result in results})
    batches = sorted({result.cell.batch for result in results})
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * (len(batches) + 1), height * len(temperatures)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(temperatures), len(batches) + 1, squeeze=False)
    for row, temperature in zip(axes, temperatures, strict=True):
        these = [result for result in results if result.cell.temperature == temperature]
        for panel, batch in zip(row, batches, strict=False):
            panel.set_title(f"temperature {temperature:g}, batch {batch}")
            _plot_speedups(panel, [result for result in these if result.cell.batch == batch], _methods(results))
        row[-1].set_title(f"temperature {temperature:g}, all batches and workloads")
        _plot_acceptance(row[-1], these, _methods(results))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=_DPI)


def _methods(results: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(result.cell.method for result in results))


def _plot_speedups(axes: Axes, results: Sequence[CellResult], methods: Sequence[str]) -> None:
    """A group of bars for each workload; thin lines go from the lowest to the highest pair of runs."""
    workloads = list(dict.fromkeys(result.cell.workload for result in results))
    bar = 0.8 / len(methods)
    for index, method in enumerate(methods):
        own = [result for result in results if result.cell.method == method]
        places = [workloads.index(result.cell.workload) - 0.4 + bar * (index + 0.5) for result in own]
        heights = [result.speedup for result in own]
        below = [result.speedup - min(result.speedups) for result in own]
        above = [max(result.speedups) - result.speedup for result in own]
        axes.bar(places, heights, bar, yerr=[below, above], error_kw={"elinewidth": 0.7}, label=method)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("TPOT off / TPOT on")


def _plot_acceptance(axes: Axes, results: Sequence[CellResult], methods: Sequence[str]) -> None:
    for method in methods:
        rates = merged([result.tally for result in results if result.cell.method == method]).acceptance
        axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, linewidth=1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted up to here, of drafts so long")
    axes.set_ylim(0, 1)

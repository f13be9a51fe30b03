"""SLO classes on the command line: their attainment, and the result of one request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

_NOTHING = "-"
_WHY_IT_MISSED = {"rejected": "the request was refused", "failed": "the request failed"}


def slo_table(classes: Mapping[str, Mapping[str, Any]], *, is_narrow: bool = False) -> Table:
    """Renders ``slo`` of the answer of GET /admin/status: targets, attainment and goodput by class and window.

    Args:
        is_narrow: fit into 80 columns, with percent signs only in the headings, and long names broken.
    """
    windows = list(next(iter(classes.values()))["windows"]) if classes else []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0 if is_narrow else (0, 1, 0, 0), pad_edge=False)
    table.add_column("SLO\nclass", overflow="fold")
    goal_heading, met_heading = ("goal\n%", "met %") if is_narrow else ("\ngoal", "met in")
    headings = ["\nTTFT", "\nTPOT", goal_heading, *_headings(met_heading, windows), *_headings("goodput/s", windows)]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    percent = _bare_percent if is_narrow else _percent
    for name, slo in classes.items():
        goal = float(slo["percentile"]) / 100
        figures = [slo["windows"][window] for window in windows]
        table.add_row(
            Text(name),
            _ms(float(slo["ttft_target_ms"])),
            _ms(float(slo["tpot_target_ms"])),
            percent(goal),
            *(_attained(entry["attainment"], goal, percent) for entry in figures),
            *(_rate(entry) for entry in figures),
        )
    return table


def queue_sentence(admission: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The numbers of queued requests in ``admission`` of GET /admin/status; ``None`` when none are queued."""
    waiting = [f"{entry['queued']} {name}" for name, entry in admission.items() if entry["queued"]]
    return f"Queued in the router: {', '.join(waiting)}." if waiting else None


def _headings(title: str, windows: Sequence[str]) -> list[str]:
    return [f"{title if index == 0 else ''}\n{window}" for index, window in enumerate(windows)]


def _attained(attainment: float | None, goal: float, percent: Callable[[float], str]) -> Text:
    if attainment is None:
        return Text(_NOTHING, style="dim")
    return Text(percent(attainment), style="green" if attainment >= goal else "red")


def _rate(figures: Mapping[str, Any]) -> Text:
    """Goodput in at most six characters, up to a million per second."""
    if not figures["requests"]:
        return Text(_NOTHING, style="dim")
    rate = float(figures["goodput_per_s"])
    return Text(f"{round(rate, 4):.3g}" if rate < 1000 else f"{rate:.0f}")


def slo_sentence(attributes: Mapping[str, Any]) -> str | None:
    """Whether a sequence met its targets, and by how much; ``None`` for a timeline without a class."""
    name = attributes.get("slo_class")
    if name is None:
        return None
    times = _times(attributes)
    match attributes.get("slo_result"):
        case None:
            return f"SLO class {name}: {times}"
        case "met":
            return f"SLO class {name} met: {times}"
        case "excluded":
            return f"SLO class {name}: not counted, because the request was cancelled or invalid"
        case result if result in _WHY_IT_MISSED:
            return f"SLO class {name} missed: {_WHY_IT_MISSED[result]}"
        case _:
            return f"SLO class {name} missed: {times}"


def _times(attributes: Mapping[str, Any]) -> str:
    parts = []
    for key, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
        target_ms = float(attributes[f"slo_{key}_target_ms"])
        margin_ms = attributes.get(f"slo_{key}_margin_ms")
        if margin_ms is None:
            parts.append(f"{name} of {_ms(target_ms)}")
        else:
            side = "over" if margin_ms < 0 else "under"
            measured = _ms(target_ms - float(margin_ms))
            parts.append(f"{name} {measured}, {_ms(abs(float(margin_ms)))} {side} the target of {_ms(target_ms)}")
    return "; ".join(parts)


def _percent(share: float) -> str:
    return f"{share * 100:.4g} %"


def _bare_percent(share: float) -> str:
    """A percentage without its sign, in at most five characters."""
    return f"{round(share * 100, 2):.4g}"


def _ms(value: float) -> str:
    """A duration with three digits: ``42 ms``, ``1.25 s``; from 1000 s on in whole seconds."""
    if value >= 1e6:
        return f"{value / 1e3:.0f} s"
    return f"{value / 1e3:.3g} s" if value >= 1000 else f"{value:.3g} ms"

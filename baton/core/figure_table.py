"""The form of tables of figures in the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table


def figure_table(*headings: str, num_left: int = 1) -> Table:
    """A table without a frame, whose columns do not wrap.

    Args:
        num_left: number of columns, from the first one on, that are aligned to the left; the others hold figures.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_left else "right", no_wrap=True)
    return table

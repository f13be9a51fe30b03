"""Checks and measures baton on a GPU: ``python -m benchmarks.device_run --out DIR [--budget 480] [--only PART]``.

Each part is a process of its own with its own time limit. Each result is one JSON line in ``DIR/report.jsonl`` that is
on the disk before the next one is computed; a table follows each part, and what parts print is in ``DIR/log.txt``. A
part that fails, hangs or breaks the device's context does not stop the others. SIGTERM and SIGINT end the part that
runs and print what there is; the run goes on after SIGHUP and without standard output. The exit status is 1 when a part
failed or did not get its turn, or a result could not be written. A part that this machine cannot run does not count,
and neither does a target that was missed; the summary shows both. Another run into the same folder appends; its rows
have another ``run``.

It runs from the working tree, with nothing installed but what is imported: torch 2.11 or newer, transformers 5.17 or
newer, numpy, psutil, rich and, on a GPU, triton 3.6 or newer with a C compiler. ``--device cpu --shape tiny`` runs
every part in about a minute.

What other parts of baton need besides, ``make device-wheels`` downloads into ``.device-wheels`` for CPython 3.12 on
x86-64 Linux; ``wheels.txt`` beside this file pins it. On a machine without a network::

    python3 -m pip install --quiet --no-index --no-deps --target /tmp/site .device-wheels/*.whl
    PYTHONPATH=/tmp/site python3 -m benchmarks.device_run --out out/device --budget 480
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.device_run.launch import CANNOT_RUN, PASSED, Launcher, prepare_process
from benchmarks.device_run.machine import MACHINE
from benchmarks.device_run.part import PARTS, SHAPES, Part, Setting, device_named
from benchmarks.device_run.report import Report
from benchmarks.device_run.tables import Screen, show_machine, show_part, show_summary
from benchmarks.options import HelpFormatter, positive_number

_WIDTH = 120
_BUDGET_S = 480.0


def main(
    options: Sequence[str] | None = None,
    parts: Sequence[Part] = PARTS,
    parser: argparse.ArgumentParser | None = None,
) -> int:
    """Runs the command. Exit status 0: all parts passed or cannot run here; 2: an option is wrong.

    Args:
        parser: from :func:`make_parser` for the same parts, possibly with further options.
    """
    parser = parser or make_parser(parts, __doc__)
    arguments = parser.parse_args(options)
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
    report, screen = Report(arguments.out, run, arguments.device), Screen(Console(width=_WIDTH))
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        report.open()
    except OSError as error:
        parser.error(f"argument --out: the report cannot be written: {error}")
    prepare_process(arguments.device)

    def tell(part: Part, status: str) -> None:
        if report.problem is not None:
            screen.warn(f"{report.path} cannot be written: {report.problem}. The tables alone have its last results.")
        if part is MACHINE and status == PASSED:
            screen.show(lambda console: show_machine(console, report.rows(part.name)))
        else:
            screen.show(lambda console: show_part(console, part.title, status, report.rows(part.name)))

    def summarize(console: Console) -> None:
        console.rule(f"run {run}", characters="-", align="left")
        show_summary(console, statuses, report.rows())
        console.print(Text(f"results: {report.path}\nlog: {report.log_path}"))

    setting = Setting(device_named(arguments.device), arguments.shape)
    launcher = Launcher(setting, report, arguments.budget, tell, arguments.patience)
    launcher.stop_at_signals()
    statuses = launcher.run(_chosen(parts, arguments.only or [part.name for part in parts]))
    screen.show(summarize)
    is_good = all(status == PASSED or status.startswith(CANNOT_RUN) for status in statuses.values())
    return 0 if is_good and report.problem is None else 1


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, got ''")
    return Path(text)


def _chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The named parts and those that they need, in order."""
    needed = {need for part in parts if part.name in names for need in part.needs}
    return [part for part in parts if part.name in needed or part.name in names]


def make_parser(parts: Sequence[Part], description: str | None) -> argparse.ArgumentParser:
    """A parser of a run's options. The default budget is at least the sum of the parts' limits."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    names = [part.name for part in parts]
    budget_s = max(_BUDGET_S, sum(part.limit_s for part in parts))
    parser.add_argument("--out", type=_folder, required=True, help="folder of the report; created if necessary")
    parser.add_argument(
        "--budget", type=positive_number, default=budget_s, help="time limit of all parts together, in seconds"
    )
    parser.add_argument("--patience", type=positive_number, default=1.0, help="factor of each part's time limit")
    only_help = "run this part and the parts that it needs; may be repeated"
    parser.add_argument("--only", choices=names, action="append", help=only_help)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device to measure")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="shape of the measured models")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Shows the progress of a run: bars on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from baton.train import trainer
from baton.train.evaluate import Acceptance
from baton.train.run import TrainingResult
from baton.train.tree_evaluation import TreeAcceptance

_STAGES = {"states": "reading answers", "training": "training", "evaluation": "evaluating"}
_SECONDS_BETWEEN_LINES = 10.0


class Display:
    """A context that shows progress.

    Args:
        console: where to show it; standard error for example.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s: dict[str, float] = {}
        self._collecting: tuple[float, int] | None = None
        self._held_out = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        self._console.print(Text(line), soft_wrap=True)

    def collected(self, num_tokens: int, total: int) -> None:
        """Shows the number of collected answer tokens."""
        now = time.monotonic()
        if self._collecting is None:
            self._collecting = now, num_tokens
        started_s, at_start = self._collecting
        speed = (num_tokens - at_start) / max(1e-9, now - started_s)
        left = f", {_duration((total - num_tokens) / speed)} left" if speed > 0 and num_tokens < total else ""
        self._show("collecting answers", num_tokens / total, f"{num_tokens:,} tokens, {speed:.0f} tokens/s{left}")

    def progressed(self, report: trainer.Progress) -> None:
        """Shows a trainer's report."""
        if report.stage == "held_out":
            self._held_out = f", held out {report.loss:.3f} ({_shares(report.agreement)})"
            return
        details = {
            "states": f"{report.tokens_per_s:.0f} tokens/s, {_duration(report.eta_s)} left",
            "training": (
                f"step {report.num_steps}, loss {report.loss:.3f}, top-1 {_shares(report.agreement)}{self._held_out}, "
                f"{report.tokens_per_s:.0f} tokens/s, {_duration(report.eta_s)} left"
            ),
        }
        self._show(_STAGES[report.stage], report.progress, details.get(report.stage, ""))

    def _show(self, stage: str, progress: float, detail: str) -> None:
        if not self._console.is_terminal:
            now = time.monotonic()
            if now - self._last_line_s.get(stage, -_SECONDS_BETWEEN_LINES) >= _SECONDS_BETWEEN_LINES:
                self._last_line_s[stage] = now
                self.say(f"{stage}: {progress:.0%}{', ' if detail else ''}{detail}")
            return
        if stage not in self._tasks:
            for earlier in self._tasks.values():
                self._bars.update(earlier, completed=1.0)
            self._tasks[stage] = self._bars.add_task(stage, total=1.0, detail="")
        self._bars.update(self._tasks[stage], completed=min(1.0, progress), detail=detail)


def summary(result: TrainingResult) -> RenderableType:
    """The final summary: acceptance, the checkpoint's folder, and how to serve with it."""
    evaluation = result.evaluation
    table = Table(title="accepted on held-out answers")
    table.add_column("answers")
    table.add_column("tokens per step", justify="right")
    num_positions = max(len(evaluation.greedy.reached), len(evaluation.sampled.reached))
    for position in range(1, num_positions + 1):
        table.add_column(f"draft {position}", justify="right")
    for name, found, tree in (
        ("temperature 0", evaluation.greedy, evaluation.greedy_tree),
        ("sampled", evaluation.sampled, evaluation.sampled_tree),
    ):
        if found.reached:
            table.add_row(name, *_figures(found, tree))
    minutes = f"{result.num_steps:,} steps in {result.elapsed_s / 60:.1f} min"
    return Group(
        table,
        Text(f"checkpoint: {result.folder} ({minutes})"),
        Text(f"to serve with it: baton up --set speculation.draft={result.folder}, or in the configuration"),
        Text(f"speculation: {{draft: {result.folder}}}"),
    )


def _figures(found: Acceptance, tree: TreeAcceptance | None) -> list[str]:
    length = f"{found.mean_accepted_length:.2f}"
    if tree is not None:
        length += f" (tree of {tree.num_nodes}: {tree.mean_accepted_length:.2f})"
    return [length, *(f"{rate:.1%}" for rate in found.unconditional)]


def _shares(shares: tuple[float, ...]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

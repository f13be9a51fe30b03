"""``baton explain --rounds``: what was drafted for an answer, and what the target accepted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from baton.core.errors import NotFoundError
from cluster.cli.cli_common import duration

_RIGHT, _WRONG = "✓", "✗"


def render_rounds(timeline: Mapping[str, Any]) -> RenderableType:
    """Renders the traces in the answer of ``GET /v1/requests/{id}/timeline``.

    Raises:
        NotFoundError: the request has no trace.
    """
    sequences: Sequence[Mapping[str, Any]] = timeline.get("sequences") or [timeline]
    return Group(*(part for sequence in sequences for part in _render_sequence(sequence)))


def _render_sequence(sequence: Mapping[str, Any]) -> list[RenderableType]:
    speculation = sequence.get("speculation")
    if speculation is None:
        raise NotFoundError(
            f"The request {sequence['request_id']} has no trace of its speculation, since it did not ask for one. "
            'Send it with "speculation": {"trace": true}.'
        )
    rounds: Sequence[Mapping[str, Any]] = speculation["rounds"]
    parts: list[RenderableType] = [Text(f"{sequence['request_id']}: {_counted(len(rounds), 'round')}", style="bold")]
    for number, one in enumerate(rounds, 1):
        parts += [_heading(number, one), *_draft(one["draft"]), _output(one["output"])]
    if left_out := speculation["left_out"]:
        parts.append(Text(f"and {_counted(left_out, 'later round')} that the router did not keep", style="dim"))
    return parts


def _heading(number: int, one: Mapping[str, Any]) -> Text:
    accepted = one["draft"]["accepted"]
    drafts = f"{one['method']}, {sum(accepted)} of {len(accepted)} accepted" if accepted else "no draft"
    times = f"drafted in {duration(one['draft_ms'])}, " if accepted else ""
    times += f"verified in {duration(one['verify_ms'])} with {_counted(one['batch_sequences'], 'sequence')}"
    return Text.assemble((f"\n{number}  {drafts}", "bold"), (f"  {times}", "dim"))


def _draft(draft: Mapping[str, Any]) -> list[RenderableType]:
    """A chain on one line, and a tree as a tree."""
    marks = list(map(_marked, draft["texts"], draft["accepted"]))
    if draft["parents"] == list(range(-1, len(marks) - 1)):
        return [Text("   ").append_text(Text("  ").join(marks))] if marks else []
    tree = Tree(Text("draft", style="dim"))
    branches: list[Tree] = []
    for mark, parent in zip(marks, draft["parents"], strict=True):
        branches.append((tree if parent < 0 else branches[parent]).add(mark))
    return [tree]


def _marked(text: str, accepted: bool) -> Text:
    return Text(f"{_RIGHT} {text!r}", style="green") if accepted else Text(f"{_WRONG} {text!r}", style="red")


def _output(output: Mapping[str, Any]) -> Text:
    """The tokens that the round added, with where its last one came from."""
    words = [
        repr(text) if verdict in ("accepted", "plain") else f"{text!r} ({verdict})"
        for text, verdict in zip(output["texts"], output["verdicts"], strict=True)
    ]
    return Text(f"   → {' '.join(words)}")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

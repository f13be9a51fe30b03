"""Parts of the generated pages."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Sequence

_PAGE = re.compile(r"docs/([a-z0-9-]+\.md)")


def plain(text: str) -> str:
    """Text of the code as Markdown: signs keep their meaning, and names of pages become links."""
    escaped = html.escape(" ".join(text.split()), quote=False).replace("|", r"\|").replace("*", r"\*")
    return _PAGE.sub(r"[\1](../\1)", escaped)


def prose(text: str) -> str:
    """Paragraphs of the code's text in lines of at most 120 characters."""
    return "\n\n".join(textwrap.fill(plain(part), 120, break_on_hyphens=False) for part in text.split("\n\n"))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (headings, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(headings)}", *lines[1:]]) + "\n"


def code(text: str) -> str:
    return f"`{text}`"

"""The Markdown files of the repository that readers see: their links, and the commands in them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SECTIONS = ("start", "learn", "deploy", "operate", "tune", "reference", "internals")
"""Folders of docs/ whose commands are run by ``tests/e2e/test_docs_commands.py``."""

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its language, and its text without the block's indentation."""

    page: str
    language: str
    text: str


@cache
def pages() -> tuple[str, ...]:
    """Paths of all Markdown files that git knows or would add, relative to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return tuple(sorted(path for path in listed.split() if (ROOT / path).is_file()))


def pages_of_sections() -> list[str]:
    """The pages of the sections in the order in which they are read."""
    found = [path for path in pages() if path.startswith(tuple(f"docs/{section}/" for section in SECTIONS))]
    return sorted(found, key=lambda path: (SECTIONS.index(path.split("/")[1]), not path.endswith("index.md"), path))


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    for indent, language, text in _FENCE.findall(text_of(page)):
        yield Block(page, language, "\n".join(line.removeprefix(indent) for line in text.splitlines()))


def links(page: str) -> Iterator[str]:
    """The targets of links outside of fenced blocks."""
    yield from _LINK.findall(_FENCE.sub("", text_of(page)))

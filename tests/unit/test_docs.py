"""Links, lines and commands of the pages. ``make docs`` checks anchors and links between pages as well."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.main import get_command

from cluster.cli.cli import app
from tests.docs_commands import LAST, NOT_RUN, SHELL, blocks_to_run
from tests.docs_pages import DOCS, ROOT, blocks, links, pages, pages_of_sections, text_of

LONGEST_LINE = 120
NEW_PAGES = ["docs/index.md", *pages_of_sections()]
COMMANDS: Any = get_command(app)
TYPED = [
    line
    for block in blocks_to_run()
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith("baton ")
]


def test_links_to_files_of_the_repository_exist() -> None:
    broken = []
    for page in pages():
        for link in links(page):
            target = urlsplit(link)
            if not target.scheme and target.path and not ((ROOT / page).parent / target.path).exists():
                broken.append(f"{page}: {link}")
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]

    def files(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [file for value in entry.values() for file in files(value)]
        return [file for value in entry for file in files(value)] if isinstance(entry, list) else [str(entry)]

    listed = files(yaml.safe_load(lines))
    assert len(listed) == len(set(listed))
    assert {f"docs/{file}" for file in listed} == {page for page in pages() if page.startswith("docs/")}


@pytest.mark.parametrize("page", NEW_PAGES)
def test_lines_are_short(page: str) -> None:
    long = [line for line in text_of(page).splitlines() if len(line) > LONGEST_LINE]
    assert [line for line in long if not line.startswith("|")] == []


def test_pages_have_commands_to_run_and_end_the_cluster() -> None:
    run = [block.text for block in blocks_to_run()]
    assert run[0] == "baton up --detach"
    assert run[-1] == LAST
    assert len(run) > 15


def test_reasons_for_not_running_a_command_name_commands_that_exist() -> None:
    first_lines = {block.text.splitlines()[0] for page in NEW_PAGES for block in blocks(page)}
    assert NOT_RUN.keys() <= first_lines


@pytest.mark.parametrize("line", TYPED)
def test_commands_of_the_pages_parse(line: str) -> None:
    words = shlex.split(re.split(r" [|<] ", line)[0], comments=True)[1:]
    command = COMMANDS
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("baton", words)


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/")])
def test_commands_in_the_text_exist(page: str) -> None:
    names = set(re.findall(r"`baton ([a-z-]+)", text_of(page)))
    assert names <= {*COMMANDS.commands}


def test_blocks_name_their_language() -> None:
    known = {*SHELL, "text", "yaml", "json", "python"}
    unmarked = [block.text for page in NEW_PAGES for block in blocks(page) if block.language not in known]
    assert unmarked == []


def test_speed_ups_of_the_page_follow_from_the_formula() -> None:
    rows = [line.split("|")[1:-1] for line in text_of("docs/learn/speculation.md").splitlines() if line[:2] == "| "]
    [tokens, speed_ups] = [row[1:] for row in rows if row[0].strip() in ("tokens per step", "speed-up")]
    for k, (shown_tokens, shown_speed_up) in enumerate(zip(tokens, speed_ups, strict=True), start=1):
        expected = (1 - 0.7 ** (k + 1)) / (1 - 0.7)
        assert float(shown_tokens) == pytest.approx(expected, abs=0.005)
        assert float(shown_speed_up.strip(" *")) == pytest.approx(expected / (1 + 0.15 * k), abs=0.006)


def test_figures_load_nothing() -> None:
    for figure in Path(DOCS).rglob("*.svg"):
        text = figure.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http" not in text
        assert "<script" not in text

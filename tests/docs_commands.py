"""Which commands of the pages ``tests/e2e/test_docs_commands.py`` runs, and why it does not run the others."""

from __future__ import annotations

from collections.abc import Iterator

from tests.docs_pages import Block, blocks, pages_of_sections

SHELL = ("bash", "console", "sh")
"""Languages of blocks that readers type. Blocks in other languages are output, files or code."""

NOT_RUN = {
    "make setup && source .venv/bin/activate": "the tests run in such an environment; .ci/run makes it by this command",
}
"""First line of a block → the reason why it is not run."""

SHOWN = {
    "baton status": r"decode-\d+ +ready|'decode'",
    "baton explain": r"in total[\s\S]*The first token took",
    "baton explain --slowest": r"spent\s+in\s+one\s+stage",
    '{"method": "lookahead"}': r"\d+ of \d+ drafts accepted \(by lookahead\)",
    "baton bench serve": r"TPOT",
    "baton bench compare": r"TPOT",
    "baton plan": r"prefill[\s\S]*decode",
    "baton scale decode=2": r"decode: 2",
    "baton config": r"default|\w+:",
    "baton upgrade": r"decode",
    "< prompt.txt": r"\(\d+ cached\)",
}
"""Part of a block → what its output shows, as a regular expression."""

LAST = "baton down"
"""Ends the cluster that all pages share, so it runs after the other blocks."""


def blocks_to_run() -> Iterator[Block]:
    """The blocks in the order of the pages, the end of the cluster last."""
    found = [block for page in pages_of_sections() for block in blocks(page) if block.language in SHELL]
    run = [block for block in found if block.text.splitlines()[0] not in NOT_RUN]
    return iter(sorted(run, key=lambda block: block.text == LAST))

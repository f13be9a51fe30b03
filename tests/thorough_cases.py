"""The record of cases that only ``make test-thorough`` runs.

Each names the case of ``make test`` that fails for the same fault: ``@pytest.mark.thorough(covered_by="test_x")``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The cases of ``make test``, and those that are thorough."""
    quick = [item for item in items if item.get_closest_marker("thorough") is None]
    thorough = [item for item in items if item.get_closest_marker("thorough") is not None]
    return quick, thorough


def wrong_records(items: Sequence[pytest.Item], root: Path) -> list[str]:
    """Cases whose ``covered_by`` is missing or names no case of ``make test``.

    * ``test_x``: any case of that test;
    * ``test_x[id]``: one case of it;
    * ``path::test_x``: a test of another file, which is looked up in the text if the file was not collected;
    * ``[part]``: a case of the same test, with an id that contains this part.
    """
    quick, thorough = split(items)
    names = {_name(item.nodeid) for item in quick} | {_name(item.nodeid).partition("[")[0] for item in quick}
    files = {item.nodeid.partition("::")[0] for item in items}
    wrong = []
    for item in thorough:
        marker = item.get_closest_marker("thorough")
        covered_by = marker.kwargs.get("covered_by", "") if marker else ""
        file, _, test = covered_by.rpartition("::")
        own_file, _, own_name = _name(item.nodeid).partition("::")
        file = file or own_file
        if test.startswith("["):
            siblings = f"{own_file}::{own_name.partition('[')[0]}["
            part = test.removeprefix("[").removesuffix("]")
            is_there = any(part in name.removeprefix(siblings) for name in names if name.startswith(siblings))
        elif file in files:
            is_there = f"{file}::{test}" in names
        else:
            function = test.partition("[")[0]
            text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            is_there = re.search(rf"^ *(?:async )?def {re.escape(function)}\(", text, re.MULTILINE) is not None
        if not (test and is_there):
            wrong.append(f"{item.nodeid}: covered_by={covered_by!r} names no test of make test")
    return wrong


def _name(node_id: str) -> str:
    """``file::test[id]``, without classes."""
    file, _, rest = node_id.partition("::")
    test, bracket, case = rest.partition("[")
    return f"{file}::{test.rpartition('::')[2]}{bracket}{case}"

from __future__ import annotations

import json

import orjson
import pytest

from baton.core.json_lines import in_one_line


@pytest.mark.parametrize("char", ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\r", "\n", "é", "…"])
def test_json_is_one_line_for_every_client(char: str) -> None:
    line = in_one_line(orjson.dumps({"a": f"x{char}y"}))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"a": f"x{char}y"}

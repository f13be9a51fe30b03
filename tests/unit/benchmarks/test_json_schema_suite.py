from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.json_schema_suite import Case, Llguidance, Outcome, judge, read_cases
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
CASES = [
    Case("type", {"type": "integer"}, [(1, True), ("a", False)]),
    Case("not", {"not": {"type": "integer"}}, [(1, False)]),
    Case("multipleOf", {"type": "number", "multipleOf": 10}, [(20, True), (7, False), (1e300, True)]),
    Case(
        "properties",
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"x": {}, "y": {}}}, "b": {}}},
        [({"b": 1, "a": {"y": 1, "x": [{}]}}, True)],
    ),
]


class AllowsAll:
    def compile(self, schema: Any) -> Callable[[list[int], Outcome], bool]:
        return lambda tokens, outcome: True


def test_schemas_are_honoured_narrow_refused_or_wrong() -> None:
    outcome = judge(Llguidance(TOKENIZER), CASES, TOKENIZER)
    assert dict(outcome.verdicts) == {"honoured": 2, "refused": 1, "narrow": 1}
    assert len(outcome.compile_s) == 3
    assert outcome.mask_s


def test_a_schema_that_allows_an_invalid_document_is_wrong() -> None:
    outcome = judge(AllowsAll(), CASES, TOKENIZER)
    assert dict(outcome.verdicts) == {"wrong": 3, "honoured": 1}
    assert outcome.wrong[0] == 'type: {"type": "integer"} allows "a"'


def test_the_suite_is_found_in_a_package(tmp_path: Path) -> None:
    folder = tmp_path / "json" / "tests" / "draft7"
    folder.mkdir(parents=True)
    group = {"schema": True, "tests": [{"data": 1, "valid": True}]}
    elsewhere = {"schema": {"$ref": "http://localhost:1234/x"}, "tests": []}
    (folder / "type.json").write_text(json.dumps([group, elsewhere]))
    assert list(read_cases(tmp_path, "draft7")) == [Case("type", True, [(1, True)])]

"""The cache lines that a tile prefetches while it multiplies. They affect speed only, not results."""

from __future__ import annotations

from typing import Any

import pytest
from llvmlite import ir

from baton.engine.cpu.emitter import LINE_BYTES
from baton.engine.cpu.vectors import _ask


def number(value: Any) -> int:
    return int(value.constant) if isinstance(value, ir.Constant) else int(value)


class Builder:
    """Computes at once what code would be made for."""

    def add(self, a: Any, b: Any) -> int:
        return number(a) + number(b)

    def mul(self, a: Any, b: Any) -> int:
        return number(a) * number(b)

    def udiv(self, a: Any, b: Any) -> int:
        return number(a) // number(b)

    def urem(self, a: Any, b: Any) -> int:
        return number(a) % number(b)

    def inttoptr(self, value: int, kind: ir.Type) -> int:
        return value


class Recorder:
    """An emitter that notes the addresses that are asked for."""

    def __init__(self) -> None:
        self.b = Builder()
        self.asked: list[int] = []

    def prefetch(self, place: int) -> None:
        self.asked.append(place)


class Steps:
    """Of a row of weights."""

    def __init__(self, step: int, weight_item: int) -> None:
        self.step, self.weight_item = step, weight_item

    def weight_line(self, place: int) -> int:
        return place * self.weight_item


@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("step", "item"), [(4, 1), (8, 1), (16, 1), (32, 1), (8, 2), (16, 2), (32, 2), (8, 4), (16, 4)]
)
def test_every_line_of_every_row_is_prefetched(step: int, item: int, num_rows: int) -> None:
    first, stride, num_lines = 1 << 20, 10 * LINE_BYTES, 3
    recorder: Any = Recorder()
    steps: Any = Steps(step, item)
    for place in range(0, num_lines * LINE_BYTES // item, step):
        before = len(recorder.asked)
        _ask(recorder, steps, place, first, stride, num_rows)
        assert len(recorder.asked) - before <= num_rows
    lines = {address // LINE_BYTES for address in recorder.asked}
    assert lines == {
        (first + row * stride) // LINE_BYTES + line for row in range(num_rows) for line in range(num_lines)
    }

"""The checks of the kernels by name: attention, rows to fp8 and rows to int8, each compared with float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from baton.engine.attention.base import AttentionBackend
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.kv_cache.paged_cache import PagedKVCache
from benchmarks.device_run.attention_cases import TINY, AttentionCase, Sizes, check_case, draw_cases
from benchmarks.device_run.attention_world import CPU
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.row_checks import check_fp8_rows, check_int8_rows

FP8_ROWS, INT8_ROWS = "rows to fp8", "rows to int8"
ROWS = (FP8_ROWS, INT8_ROWS)
_NUM_CASES, _NUM_TINY = 80, 6
_TINY_KEYS_PER_SPLIT, _TINY_PROGRAMS = 4, 64
"""Small enough that several programs share a short context."""


@cache
def attention_cases(is_tiny: bool, seed: int) -> dict[str, AttentionCase]:
    """The cases of attention by name."""
    return draw_cases(_NUM_TINY, TINY, seed) if is_tiny else draw_cases(_NUM_CASES, Sizes(), seed)


def names(setting: Setting) -> list[str]:
    """The names of all checks, the longest first, so that the processes that share them end together."""
    cases = attention_cases(setting.is_tiny, setting.seed)
    return [*ROWS, *sorted(cases, key=lambda name: -cases[name].cost)]


def check(name: str, setting: Setting) -> Iterator[Row]:
    """Yields the rows of one check."""
    if name == FP8_ROWS:
        yield from check_fp8_rows(setting.device)
    elif name == INT8_ROWS:
        yield from check_int8_rows(setting.device)
    else:
        case = attention_cases(setting.is_tiny, setting.seed)[name]
        if setting.device.type == "cuda":
            yield check_case(case, create_triton, setting.device)
        else:
            yield _check_on_cpu(case)


def create_triton(cache: PagedKVCache) -> AttentionBackend:
    """A Triton backend. On the CPU, the interpreter must be on before Triton is imported."""
    from baton.engine.attention.triton_paged import TritonPaged  # imported late: not every platform has Triton

    if cache.device.type == "cuda":
        return TritonPaged(cache)
    return TritonPaged(cache, _TINY_KEYS_PER_SPLIT, _TINY_PROGRAMS)


def _check_on_cpu(case: AttentionCase) -> Row:
    """Checks the case in Triton's interpreter, or ``torch_sdpa`` where the interpreter refuses the installed numpy."""
    from triton.runtime.errors import InterpreterError

    try:
        return check_case(case, create_triton, CPU)
    except InterpreterError as error:
        shape = replace(case.shape, dtype="float32")  # in other dtypes, torch rounds more often
        row = check_case(replace(case, shape=shape), TorchSDPA, CPU)
        return {**row, "note": f"float32 by torch_sdpa, since Triton's interpreter failed: {error}"}

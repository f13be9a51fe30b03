"""The costs of a compiled kernel: registers, spills, shared memory, widths of reads, layouts of products."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.triton_launches import Compiled

READS = {"attend": ("k", "v"), "merge": ("parts",), "quantize_row": ("numbers",)}
"""The variables of each kernel that receive most of its reads."""
PRODUCTS = {"attend": ("scores", "acc")}
"""The variables with results of ``tl.dot``: queries times keys, then weights times values."""
WIDEST_READ = 16
"""Bytes that one thread can read with one instruction."""
SHARED_LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Maximum bytes of shared memory of a program, by compute capability times ten (CUDA programming guide)."""
TENSOR_MEMORY_LIMIT = 512
_DECODE_ROWS = 16
_DECODE_REGISTERS = 128  # with 128 threads, four programs fit on a multiprocessor with 65,536 registers
_WARP_GROUP_ROWS = 64  # of four warps; the minimum for the newest tensor cores of capability 9.0 and 10.0

SHORTFALLS = {
    "spills": "registers are spilled to memory",
    "registers": f"a decode tile of {_DECODE_ROWS} rows takes more than {_DECODE_REGISTERS} registers per thread",
    "narrow": f"keys or values are read in pieces of less than {WIDEST_READ} bytes",
    "repeats": "warps repeat what other warps multiply",
    "exchange": f"warps exchange weights between the products, though four could share {_WARP_GROUP_ROWS} rows without",
    "old-mma": f"{_WARP_GROUP_ROWS} rows do not use the newest instruction of the tensor cores (wgmma, tcgen05)",
}
"""Shortcomings of variants that work nevertheless. The table lists the known ones, which are to be fixed later."""


@dataclass(frozen=True, slots=True)
class Product:
    """The implementation of a ``tl.dot``.

    Attributes:
        unit: ``mma``, ``wgmma`` or ``tcgen05``.
        warps: number of warps along rows and columns; ``(1, 1)`` for tcgen05, which one thread launches for all warps.
        instruction: rows and columns of one instruction, of one warp (mma, wgmma) or of the program (tcgen05).
        repeats: how often each number is computed, which should be 1.
    """

    unit: str
    warps: tuple[int, int]
    instruction: tuple[int, int]
    repeats: int

    def __str__(self) -> str:
        rows, columns = self.instruction
        warps = "" if self.unit == "tcgen05" else "{}x{} warps of ".format(*self.warps)
        return f"{self.unit} {warps}{rows}x{columns}" + (f" computed {self.repeats} times" if self.repeats > 1 else "")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a compiled kernel.

    Attributes:
        registers: registers per thread.
        spilled: bytes of register spills per thread, as ptxas counts them.
        shared: bytes of shared memory of a program.
        reads: bytes of the narrowest instruction that reads each of :data:`READS`.
        products: the products of :data:`PRODUCTS`.
        rows: rows of the tile, or 0 for kernels without a tile.
    """

    registers: int
    spilled: int
    shared: int
    reads: tuple[int, ...]
    products: tuple[Product, ...]
    rows: int

    def shortfalls(self, capability: int) -> list[str]:
        """The names of the :data:`SHORTFALLS` that apply."""
        return [name for name, applies in self._faults(capability).items() if applies]

    def _faults(self, capability: int) -> dict[str, bool]:
        return {
            "spills": self.spilled > 0,
            "registers": self.rows == _DECODE_ROWS and self.registers > _DECODE_REGISTERS,
            "narrow": min(self.reads) < WIDEST_READ,
            "repeats": any(product.repeats > 1 for product in self.products),
            "exchange": self.rows >= _WARP_GROUP_ROWS and _exchange(*self.products),
            "old-mma": self.rows >= _WARP_GROUP_ROWS
            and any(product.unit != {90: "wgmma", 100: "tcgen05"}.get(capability, "mma") for product in self.products),
        }


def figures_of(compiled: Compiled, capability: int) -> Figures:
    """Reads the figures from the compiler's output.

    Raises:
        ValueError: the launch needs more memory than a GPU of this capability has, or the output lacks a figure, for
            example because a variable of the kernel has another name.
    """
    if compiled.shared > SHARED_LIMITS[capability] or compiled.tensor_memory > TENSOR_MEMORY_LIMIT:
        raise ValueError(
            f"{compiled.name} cannot be launched on capability {capability / 10}: it asks for {compiled.shared} bytes "
            f"of shared memory of at most {SHARED_LIMITS[capability]}, and for {compiled.tensor_memory} columns of "
            f"tensor memory of at most {TENSOR_MEMORY_LIMIT}."
        )
    variables = _variables(compiled.kernel.fn)
    reads, products = _reads(compiled, variables), _products(compiled, variables)
    log = compiled.ptxas
    return Figures(
        registers=_number(r"Used (\d+) registers", log),
        spilled=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        shared=compiled.shared,
        reads=tuple(_found(reads, name, compiled) for name in READS[compiled.name]),
        products=tuple(_found(products, name, compiled) for name in PRODUCTS.get(compiled.name, ())),
        rows=compiled.constants.get("block_m", 0),
    )


def _exchange(scores: Product, acc: Product) -> bool:
    """Whether warps multiply other weights than those that they hold."""
    return scores.warps != acc.warps or scores.warps[1] > 1


def _found(among: dict[str, Any], name: str, compiled: Compiled) -> Any:
    if name not in among:
        raise ValueError(f"{compiled.name}: the compiler's output has nothing for `{name}`, only for {sorted(among)}.")
    return among[name]


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"The compiler does not report {pattern!r}:\n{text}")
    return int(found[1])


def _variables(function: Any) -> dict[int, str]:
    """The variable that each line of a function computes, by line number in the file."""
    source, first = inspect.getsourcelines(function)
    found = {}
    for node in ast.walk(ast.parse("".join(source))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[first + line - 1] = node.targets[0].id
    return found


def _reads(compiled: Compiled, variables: dict[int, str]) -> dict[str, int]:
    """The bytes of the narrowest read of each variable, by the source lines in PTX."""
    own = Path(inspect.getfile(compiled.kernel.fn)).name
    files = dict(re.findall(r'\.file\s+(\d+) "[^"]*?([^"/]+)"', compiled.ptx))
    widths: dict[str, int] = {}
    variable = None
    for line in compiled.ptx.splitlines():
        if place := re.search(r"\.loc\s+(\d+) (\d+)", line):
            variable = variables.get(int(place[2])) if files[place[1]] == own else None
        elif variable is None:
            continue
        elif copied := re.search(r"cp\.async\.c[ag]\.shared\.global.*?\], (0x\w+|\d+)", line):
            widths[variable] = min(int(copied[1], 0), widths.get(variable, WIDEST_READ))
        elif loaded := re.search(r"\bld\.global\S*?(?:\.v(\d))?\.[bufs](\d+)", line):
            width = int(loaded[1] or 1) * int(loaded[2]) // 8
            widths[variable] = min(width, widths.get(variable, WIDEST_READ))
    return widths


def _products(compiled: Compiled, variables: dict[int, str]) -> dict[str, Product]:
    """The product of each variable, by the source lines in Triton's GPU IR."""
    encoding = r"^(#\w+) = #(?:ttg\.nvidia_mma|ttng\.tensor_memory_encoding)<(.*)>"
    layouts = dict(re.findall(encoding, compiled.ttgir, re.M))
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", compiled.ttgir, re.M))
    found = {}
    for line in compiled.ttgir.splitlines():
        if not (dot := re.search(r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) .*loc\((#loc\d*)\)", line)):
            continue
        place = places[dot[1]]
        while inner := re.search(r"\((#loc\d*)\)", place):  # a name that refers to its own location
            place = places[inner[1]]
        variable = variables.get(int(place.split(":")[-2]))
        rows, columns, layout = re.findall(r"<(\d+)x(\d+)xf32, (#\w+)", line)[-1]  # the result
        if variable is not None:
            found[variable] = _product(layouts[layout], int(rows), int(columns))
    return found


def _product(layout: str, rows: int, columns: int) -> Product:
    if block := re.search(r"blockM = (\d+), blockN = (\d+)", layout):
        return Product("tcgen05", (1, 1), (int(block[1]), int(block[2])), 1)
    version = _number(r"versionMajor = (\d)", layout)
    warps, instruction = (
        (_number(rf"{name} = \[(\d+)", layout), _number(rf"{name} = \[\d+, (\d+)", layout))
        for name in ("warpsPerCTA", "instrShape")
    )
    along_rows, along_columns = warps[0] * instruction[0] // rows, warps[1] * instruction[1] // columns
    return Product({2: "mma", 3: "wgmma"}[version], warps, instruction, max(1, along_rows) * max(1, along_columns))

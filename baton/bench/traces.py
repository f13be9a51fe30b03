"""Recorded traffic without text: arrival times, token counts and shared prefixes.

Two public formats are read. Mooncake (FAST'25 trace release): JSONL with ``timestamp`` in ms, ``input_length``,
``output_length`` and ``hash_ids``, one id for each block of 512 prompt tokens; equal ids mean equal blocks with an
equal prefix before them. Azure LLM inference traces: CSV with the columns ``TIMESTAMP``, ``ContextTokens``,
``GeneratedTokens``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.core.option_text import known_name

MOONCAKE_BLOCK_TOKENS = 512
AUTO_FORMAT = "auto"
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        at_s: arrival in seconds since the first request of the trace.
        input_tokens: tokens of the prompt.
        output_tokens: tokens of the answer.
        hash_ids: ids of the prompt's blocks; empty if the trace has none.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, file_format: str = AUTO_FORMAT) -> list[TraceRequest]:
    """Reads the requests of a trace, in order of arrival.

    Args:
        file_format: ``mooncake``, ``azure``, or ``auto``, which decides by the first character.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not of that format. The text names the line.
    """
    known_name("--trace-format", file_format, (AUTO_FORMAT, *_READERS))
    try:
        lines = path.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: cannot read {path}: {error}.") from error
    if file_format == AUTO_FORMAT:
        file_format = "mooncake" if lines and lines[0].lstrip().startswith("{") else "azure"
    requests = sorted(_READERS[file_format](path, lines), key=lambda request: request.at_s)
    if not requests:
        raise ConfigError(f"--trace: {path} contains no requests. Expected the {file_format} format.")
    first_s = requests[0].at_s
    return [replace(request, at_s=request.at_s - first_s) for request in requests]


def cut_trace(requests: Iterable[TraceRequest], start_s: float, seconds: float | None) -> list[TraceRequest]:
    """The requests that arrived in ``[start_s, start_s + seconds)``, with times relative to ``start_s``.

    Raises:
        ConfigError: there are no such requests.
    """
    end_s = float("inf") if seconds is None else start_s + seconds
    kept = [replace(request, at_s=request.at_s - start_s) for request in requests if start_s <= request.at_s < end_s]
    if not kept:
        raise ConfigError(f"--trace: no request arrived between {start_s:g} s and {end_s:g} s. Choose another part.")
    return kept


def lay_blocks(hash_ids: Sequence[int], block_tokens: float, num_tokens: int) -> list[tuple[int, int]]:
    """Returns (hash id, tokens) of each part of a prompt of ``num_tokens`` with blocks of ``block_tokens``.

    Blocks begin at the same token in every prompt, even if the scaled length is a fraction. The last block fills the
    prompt. A clipped prompt keeps its first blocks and its last one, so that conversations that differ only at the end
    stay different.
    """
    bounds = [round(position * block_tokens) for position in range(len(hash_ids) + 1)]
    bounds[-1] = max(bounds[-1], num_tokens)
    tail = 0
    if num_tokens <= bounds[-2]:
        tail = min(max(1, round(block_tokens)), max(1, num_tokens // 2))
    parts: list[tuple[int, int]] = []
    room = num_tokens - tail
    for position, block in enumerate(hash_ids):
        # A scaled block may have no token.
        if tokens := min(bounds[position + 1] - bounds[position], room):
            parts.append((block, tokens))
            room -= tokens
    return [*parts, (hash_ids[-1], tail)] if tail else parts


def _read_mooncake(path: Path, lines: Iterable[str]) -> list[TraceRequest]:
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values: Any = json.loads(line)
            request = TraceRequest(
                float(values["timestamp"]) / 1000.0,
                int(values["input_length"]),
                int(values["output_length"]),
                tuple(int(block) for block in values.get("hash_ids", ())),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _bad_line(path, number, "mooncake", error) from error
        requests.append(_checked(path, number, request))
    return requests


def _read_azure(path: Path, lines: Iterable[str]) -> list[TraceRequest]:
    reader = csv.DictReader(lines)
    missing = set(_AZURE_COLUMNS) - set(reader.fieldnames or ())
    if missing:
        raise ConfigError(
            f"--trace: {path} is neither Mooncake JSONL nor a CSV with the columns {', '.join(_AZURE_COLUMNS)}; "
            f"missing: {', '.join(sorted(missing))}."
        )
    requests = []
    for number, row in enumerate(reader, start=2):
        try:
            request = TraceRequest(
                _azure_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise _bad_line(path, number, "azure", error) from error
        requests.append(_checked(path, number, request))
    return requests


def _azure_seconds(text: str) -> float:
    """Seconds since 1970. The files have seven decimals, one more than ``datetime`` reads."""
    whole, _, decimals = text.strip().partition(".")
    moment = datetime.fromisoformat(whole)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{decimals}") if decimals else 0.0)


def _checked(path: Path, number: int, request: TraceRequest) -> TraceRequest:
    if request.input_tokens < 0 or request.output_tokens < 0:
        raise _bad_line(path, number, "", ValueError("a negative number of tokens"))
    # An empty prompt or answer cannot be requested, so it gets one token.
    return replace(request, input_tokens=max(1, request.input_tokens), output_tokens=max(1, request.output_tokens))


def _bad_line(path: Path, number: int, file_format: str, error: Exception) -> ConfigError:
    kind = f"{file_format} " if file_format else ""
    return ConfigError(
        f"--trace: line {number} of {path} is not a valid {kind}request: {type(error).__name__}: {error}."
    )


_READERS: Mapping[str, Callable[[Path, Iterable[str]], list[TraceRequest]]] = {
    "mooncake": _read_mooncake,
    "azure": _read_azure,
}

"""JSON in one line for every client: some end a line at more characters than the line feed."""

from __future__ import annotations

import json

_LINE_ENDS = [(char.encode(), json.dumps(char)[1:-1].encode()) for char in "\x85\u2028\u2029"]
"""Characters where some clients end a line, as Python's ``splitlines`` does, and their escapes in JSON."""


def in_one_line(encoded: bytes) -> bytes:
    """JSON in UTF-8 without white space, with escapes for these characters."""
    for line_end, escape in _LINE_ENDS:
        encoded = encoded.replace(line_end, escape)
    return encoded

"""Messages in the shape of a coding agent's."""

from __future__ import annotations

import json
from typing import Any

_CACHED = {"cache_control": {"type": "ephemeral"}}


def turn(index: int) -> list[dict[str, Any]]:
    """Turn ``index``: a message of the user, one to four calls, their results, and an answer."""
    calls = [_call(index, number) for number in range(1 + index % 4)]
    parts = [{"type": "text", "text": f"Step {index}", **_CACHED}, {"type": "text", "text": ""}]
    answer: dict[str, Any] = {"role": "assistant", "content": None if index % 3 else "I look.", "tool_calls": calls}
    if index % 4 == 0:
        answer |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
        answer["reasoning_content"] = "Hm."
    output = [{"type": "text", "text": "ok", **_CACHED}] if index % 2 else ""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": output} for call in calls]
    done = {"role": "assistant", "content": [{"type": "text", "text": "Done."}], "tool_calls": None}
    return [{"role": "user", "content": parts}, answer, *results, done]


def _call(index: int, number: int) -> dict[str, Any]:
    arguments = json.dumps({"path": f"src/{number}.py", "text": 'a\n"b"', "lines": [1, None]})
    return {
        "id": f"toolu_{index:02}_{number}",
        "type": "function",
        "index": number,
        "function": {"name": "get_weather", "arguments": arguments},
    }

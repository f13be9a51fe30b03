"""The input of a response as messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.gateway.openai.nested import (
    check_neutral,
    check_size,
    checked_choice,
    checked_list,
    checked_object,
    checked_string,
    checked_word,
    unsupported,
    unsupported_type,
    wrong,
)

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_WITHOUT_EFFECT = ("id", "status", "type")
_HINTS = ("annotations", "cache_control")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"namespace": (), "caller": ({"type": "direct"},), "async": (False,)}


def messages_of(request_input: Any, instructions: str | None) -> list[Message]:
    """Messages of a chat, in the order of the items.

    An assistant's reasoning, text and calls become one message, as an answer has them. System messages at the
    beginning become one, since many chat templates take no more.

    Raises:
        InvalidRequestError: the input is malformed; the message names the item.
        UnsupportedParameterError: an item that is no text, function call or reasoning.
    """
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(request_input, str):
        return [*messages, {"role": "user", "content": request_input}]
    if not isinstance(request_input, list):
        raise wrong("input", "must be a string or an array of items.")
    check_size(request_input, "input")
    for index, item in enumerate(request_input):
        if len(message := _message_of(item, f"input[{index}]")) > 1:  # not that of reasoning without a text
            _add(messages, message)
    if not messages:
        raise wrong("input", "is empty; it must have at least one item.")
    return messages


def _message_of(item: Any, path: str) -> Message:
    kind = item.get("type") if isinstance(item, dict) else None
    read = _message if kind is None else _READERS.get(kind) if isinstance(kind, str) else None
    if kind == "item_reference":
        raise unsupported(path, "refers to a stored item, but nothing is stored; send the item itself.")
    if read is None:
        raise unsupported_type(path, kind, _READERS)
    return read(item, path)


def _message(item: Any, path: str) -> Message:
    item = checked_object(item, path, ("role", "content", "name", "phase", *_HINTS, *_WITHOUT_EFFECT))
    role = checked_choice(item.get("role"), f"{path}.role", _ROLES)
    message = {"role": role, "content": _text(item.get("content", ""), f"{path}.content")}
    if "name" in item:
        message["name"] = checked_string(item["name"], f"{path}.name")
    return message


def _call(item: Any, path: str) -> Message:
    item = checked_object(item, path, ("call_id", "name", "arguments", "parsed_arguments", *_WITHOUT_EFFECT, *_NEUTRAL))
    check_neutral(item, path, _NEUTRAL)
    call_id, name = (checked_word(item.get(key), f"{path}.{key}") for key in ("call_id", "name"))
    arguments = checked_string(item.get("arguments", ""), f"{path}.arguments")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _output(item: Any, path: str) -> Message:
    item = checked_object(item, path, ("call_id", "output", "name", *_WITHOUT_EFFECT, *_NEUTRAL))
    check_neutral(item, path, _NEUTRAL)
    call_id = checked_word(item.get("call_id"), f"{path}.call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output", ""), f"{path}.output")}


def _reasoning(item: Any, path: str) -> Message:
    item = checked_object(item, path, ("summary", "content", "encrypted_content", *_WITHOUT_EFFECT))
    for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if item.get(key):
            return {"role": "assistant", "reasoning_content": _text(item[key], f"{path}.{key}", (kind,))}
    if item.get("encrypted_content"):
        raise unsupported(path, "has reasoning that is encrypted, which only its author can read; leave the item out.")
    return {"role": "assistant"}


_READERS: Mapping[str, Callable[[Any, str], Message]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _text(content: Any, path: str, kinds: Sequence[str] = ("input_text", "output_text", "text", "refusal")) -> str:
    if isinstance(content, str):
        return content
    parts = checked_list(content, path, "a string or an array of parts")
    return "\n".join(_part(part, f"{path}[{index}]", kinds) for index, part in enumerate(parts))


def _part(part: Any, path: str, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind not in kinds:
        raise unsupported_type(path, kind, kinds)
    key = "refusal" if kind == "refusal" else "text"
    part = checked_object(part, path, ("type", key, "logprobs", "prompt_cache_breakpoint", *_HINTS))
    return checked_string(part.get(key), f"{path}.{key}")


def _add(messages: list[Message], message: Message) -> None:
    """Adds a message, or joins it with the last one if both are parts of one message."""
    last: Message = messages[-1] if messages else {"role": ""}
    is_first = len(messages) == 1 and last["role"] == "system" and message["role"] in ("system", "developer")
    is_same_turn = last["role"] == message["role"] == "assistant" and (
        "tool_calls" in last or "tool_calls" in message or "content" not in last
    )
    if not is_first and not is_same_turn:
        messages.append(message)
        return
    for key, separator in (("content", "\n\n" if is_first else "\n"), ("reasoning_content", "\n\n")):
        if message.get(key):
            last[key] = f"{last[key]}{separator}{message[key]}" if last.get(key) else message[key]
        elif key in message:
            last.setdefault(key, message[key])
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]

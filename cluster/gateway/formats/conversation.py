"""Earlier calls and tool results, in the form that a model's chat template expects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, product
from typing import Any

from baton.core.errors import InvalidRequestError
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.formats.base import whole_characters
from cluster.gateway.formats.hermes import CLOSE, OPEN

Message = dict[str, Any]

SHORT_ID_CHARS = 9
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, write its name and its arguments like this:
{example}"""


class CallIds(Enum):
    """How a chat template wants the ids of calls."""

    AS_SENT = "as sent"
    SHORT = "nine letters and digits"
    NAMED = "functions.NAME:INDEX, since the template does not write the name"


@dataclass(frozen=True, slots=True)
class HistoryStyle:
    """How a chat template wants earlier calls. :func:`find_style` tries what a template renders.

    Attributes:
        one_call: a message has one call. Parallel ones become messages of their own, each before its result.
        arguments_as_text: arguments are JSON text, not an object.
        omits_content: a message without text has no content, instead of an empty one.
    """

    ids: CallIds
    one_call: bool
    arguments_as_text: bool
    omits_content: bool

    def apply(self, messages: Sequence[Message], *, thinks_aside: bool = False) -> list[Message]:
        """Messages for the template. The arguments of calls arrive as JSON text.

        Args:
            thinks_aside: the template has only one text beside a call, which it takes for reasoning.
        """
        split = _one_call_each(messages) if self.one_call else messages
        id_of = _id_writer(self.ids, messages)
        return [self._message(message, thinks_aside, id_of) for message in split]

    def _message(self, message: Message, thinks_aside: bool, id_of: Callable[[str], str]) -> Message:
        found = dict(message)
        if (call_id := found.get("tool_call_id")) is not None:
            found["tool_call_id"] = id_of(call_id)
        if calls := found.get("tool_calls"):
            found["tool_calls"] = [{**self._call(call), "id": id_of(call["id"])} for call in calls]
            if thinks_aside:
                texts = [found.pop("reasoning_content", ""), found["content"]]
                found["content"] = "\n\n".join(filter(None, texts))
            if self.omits_content and not found["content"]:
                del found["content"]
        return found

    def _call(self, call: Mapping[str, Any]) -> Message:
        function = call["function"]
        arguments = function["arguments"]
        value = arguments if self.arguments_as_text else arguments_object(arguments)
        return {"type": "function", "function": {**function, "arguments": value}}


def _id_writer(ids: CallIds, messages: Sequence[Message]) -> Callable[[str], str]:
    """What writes the ids of calls in the form that a template wants."""
    if ids is CallIds.SHORT:
        return _short_id
    named: dict[str, str] = {}
    if ids is CallIds.NAMED:
        for call in (call for message in messages for call in message.get("tool_calls") or ()):
            named.setdefault(call["id"], f"functions.{call['function']['name']}:{len(named)}")
    return lambda call_id: named.get(call_id, call_id)


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:SHORT_ID_CHARS]


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call. Text that is no JSON object, such as that of a call cut off, is shown to the model.

    Halves of characters, which a model may write as escapes, are U+FFFD, since no prompt can hold them.
    """
    try:
        found = json.loads(whole_characters(text.encode()) or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"invalid_json": text}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    moved: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if message.get("tool_call_id") not in moved:
                yield message
            continue
        for index, call in enumerate(calls):
            yield {**message, "content": "" if index else message["content"], "tool_calls": [call]}
            if index < len(calls) - 1 and (result := results.get(call["id"])) is not None:
                moved.add(call["id"])
                yield result


def with_tools_listed(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], example: str) -> list[Message]:
    """Lists the tools in the system message, for templates that do not.

    Args:
        example: a call as the model must write it.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = _TOOLS_PROMPT.format(tools=listed, example=example)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls as text of the assistant in the Hermes form, and results as messages of the user, for templates that render
    neither."""
    found: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            found.append({"role": "user", "content": "\n".join(results)})
        else:
            found += map(_with_calls_as_text, group)
    return found


def _with_calls_as_text(message: Message) -> Message:
    calls = [f"{OPEN}\n{_call_text(call)}\n{CLOSE}" for call in message.get("tool_calls") or ()]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [message["content"], *calls]))}


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    value = {"name": function["name"], "arguments": arguments_object(function["arguments"])}
    return json.dumps(value, ensure_ascii=False)


_PROBE_KEY = "probe_city"


def find_style(tokenizer: Tokenizer) -> HistoryStyle | None:
    """The first style whose calls the template renders; ``None`` if it renders none."""
    if not tokenizer.has_chat_template:
        return None
    arguments = json.dumps({_PROBE_KEY: "Oslo"})
    calls: list[Message] = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, name in enumerate(("probe_first", "probe_second"))
    ]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "name": "not_the_name_of_a_call", "content": "rain"}
        for call in calls
    ]
    user: Message = {"role": "user", "content": "hello"}
    messages: list[Message] = [user, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    either = (False, True)
    for choice in product(CallIds, either, either, (True, False)):
        style = HistoryStyle(*choice)
        try:
            text = tokenizer.render_chat(style.apply(messages)).rpartition(user["content"])[2]
        except InvalidRequestError:
            continue
        is_complete = all(call["function"]["name"] in text for call in calls) and _PROBE_KEY in text
        if is_complete and "None" not in text and f"'{_PROBE_KEY}'" not in text and f'\\"{_PROBE_KEY}' not in text:
            return style
    return None


def lists_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template tells the model about tools."""
    if not tokenizer.has_chat_template:
        return False
    function = {"name": "probe_first", "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        text = tokenizer.render_chat(
            [{"role": "user", "content": "hello"}], tools=[{"type": "function", "function": function}]
        )
    except InvalidRequestError:
        return False
    return "probe_first" in text

"""Outputs in the form of each family, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.gateway.formats.base import Event, Function, OutputParser
from cluster.gateway.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from cluster.gateway.formats.source import Source
from cluster.gateway.openai.chat_message import ChatMessage

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["c", "f"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
)
NOW = Function("now", {"type": "object", "properties": {}, "additionalProperties": False})
FUNCTIONS = (WEATHER, NOW)


@dataclass(frozen=True)
class Sample:
    name: str
    form: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str = ""
    reasoning: str = ""


OSLO = ("get_weather", '{"city": "Oslo"}')
NOTHING = ("now", "{}")

SAMPLES = (
    Sample(
        "hermes",
        "hermes",
        'Ok.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
        (OSLO, NOTHING),
        "Ok.",
    ),
    Sample(
        "hermes, arguments first and an escaped quote",
        "hermes",
        '<tool_call>{"arguments": {"city": "a\\"}"}, "name": "get_weather"}</tool_call>',
        (("get_weather", '{"city": "a\\"}"}'),),
    ),
    Sample(
        "hermes, arguments as a string",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": 1}"}</tool_call>',
        (("get_weather", '{"city": 1}'),),
    ),
    Sample("hermes, no arguments and no end", "hermes", '<tool_call>\n{"name": "now"}', (NOTHING,)),
    Sample("hermes, no JSON", "hermes", "a <tool_call>nope</tool_call> <b>", (), "a <tool_call>nope</tool_call> <b>"),
    Sample(
        "hermes, no JSON and then a call",
        "hermes",
        '<tool_call>[1]</tool_call><tool_call>{"name": "now"}</tool_call>',
        (NOTHING,),
        "<tool_call>[1]</tool_call>",
    ),
    Sample(
        "hermes, broken arguments",
        "hermes",
        'a <tool_call>{"name": "now", "arguments": {"x": y}}</tool_call>',
        (),
        'a <tool_call>{"name": "now", "arguments": {"x": y}}</tool_call>',
    ),
    Sample(
        "hermes, cut off",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"x": "long',
        (),
        '<tool_call>{"name": "now", "arguments": {"x": "long',
    ),
    Sample("hermes, text that begins like a mark", "hermes", "a <tool_ca", (), "a <tool_ca"),
    Sample(
        "qwen_xml",
        "qwen_xml",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nOs"lo\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        "</function>\n</tool_call>",
        (("get_weather", '{"city": "Os\\"lo", "days": 3}'),),
    ),
    Sample(
        "qwen_xml, two calls",
        "qwen_xml",
        "Ok.\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (NOTHING, NOTHING),
        "Ok.",
    ),
    Sample(
        "qwen_xml, no mark and an untyped value",
        "qwen_xml",
        "<function=f><parameter=a>[1, true]</parameter></function>",
        (("f", '{"a": [1, true]}'),),
    ),
    Sample(
        "qwen_xml, cut off",
        "qwen_xml",
        "<tool_call><function=f><parameter=a>x",
        (),
        "<tool_call><function=f><parameter=a>x",
    ),
    Sample(
        "glm",
        "glm",
        'Ok.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os"lo</arg_value>\n<arg_key>days</arg_key>\n'
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        (("get_weather", '{"city": "Os\\"lo", "days": 3}'), NOTHING),
        "Ok.",
    ),
    Sample(
        "glm47",
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call><tool_call>now</tool_call>",
        (OSLO, NOTHING),
    ),
    Sample("glm, no name", "glm", "<tool_call>a call</tool_call>", (), "<tool_call>a call</tool_call>"),
    Sample("glm, cut off", "glm", "<tool_call>now\n<arg_key>a</arg", (), "<tool_call>now\n<arg_key>a</arg"),
    Sample("glm, broken value", "glm", "<tool_call>f<arg_key>a</arg_key>b", (), "<tool_call>f<arg_key>a</arg_key>b"),
    Sample(
        "minimax",
        "minimax",
        'Ok.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Os\nlo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>\n',
        (("get_weather", '{"city": "Os\\nlo", "days": 3}'), NOTHING),
        "Ok.",
    ),
    Sample(
        "minimax, another tag",
        "minimax",
        "<minimax:tool_call><tool_name>now</tool_name></minimax:tool_call>",
        (),
        "<minimax:tool_call><tool_name>now</tool_name></minimax:tool_call>",
    ),
    Sample(
        "kimi",
        "kimi",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 <|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        (OSLO, NOTHING),
        "Ok.",
    ),
    Sample(
        "kimi, no id",
        "kimi",
        "<|tool_call_begin|>a b<|tool_call_argument_begin|>{}",
        (),
        "<|tool_call_begin|>a b<|tool_call_argument_begin|>{}",
    ),
    Sample(
        "llama_json",
        "llama_json",
        'Ok. {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}',
        (OSLO, NOTHING),
        "Ok.",
    ),
    Sample(
        "llama_json, tagged",
        "llama_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        (NOTHING,),
    ),
    Sample(
        "llama_json, other objects",
        "llama_json",
        '{"name": "Ada", "x": {"name": "now"}} {}',
        (),
        '{"name": "Ada", "x": {"name": "now"}} {}',
    ),
    Sample(
        "pythonic",
        "pythonic",
        "Ok. [get_weather(city='Os, (l]o', days=3), now()]",
        (("get_weather", '{"city": "Os, (l]o", "days": 3}'), NOTHING),
        "Ok.",
    ),
    Sample(
        "pythonic, marked",
        "pythonic",
        "<|python_start|>[now(a=[true, None])]<|python_end|>",
        (("now", '{"a": [true, null]}'),),
    ),
    Sample("pythonic, lists", "pythonic", "[1, f()] [now(1)] [now(a=b)", (), "[1, f()] [now(1)] [now(a=b)"),
    Sample(
        "mistral",
        "mistral",
        'Ok.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]',
        (OSLO, NOTHING),
        "Ok.",
    ),
    Sample(
        "mistral, the second is broken",
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {]}}]',
        (NOTHING,),
        ' {"name": "now", "arguments": {]}}]',
    ),
    Sample(
        "mistral_args",
        "mistral_args",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
        (OSLO, NOTHING),
    ),
    Sample("mistral_args, no arguments", "mistral_args", "[TOOL_CALLS]now[ARGS]", (), "[TOOL_CALLS]now[ARGS]"),
    Sample(
        "deepseek_v3",
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (OSLO,),
    ),
    Sample(
        "deepseek_v31",
        "deepseek_v31",
        "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (NOTHING, NOTHING),
        "Ok.",
    ),
    Sample("deepseek_v31, no call", "deepseek_v31", "<｜tool▁calls▁begin｜>now{}", (), "<｜tool▁calls▁begin｜>now{}"),
    Sample(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        (OSLO,),
        "",
        "Hm.",
    ),
    Sample(
        "harmony, recipient first", "harmony", " to=functions.now<|channel|>commentary json<|message|>{}", (NOTHING,)
    ),
    Sample(
        "harmony, preamble and answer",
        "harmony",
        "<|channel|>commentary<|message|>Ok. <|end|><|start|>assistant<|channel|>final<|message|>It <b>rains.\n",
        (),
        "Ok. \n\nIt <b>rains.\n",
    ),
    Sample("harmony, no header", "harmony", "It rains.", (), "It rains."),
    Sample(
        "harmony, unknown function",
        "harmony",
        "<|channel|>commentary to=functions.x<|message|>{}",
        (),
        "<|channel|>commentary to=functions.x<|message|>{}",
    ),
)

THOUGHTS = (
    Sample("think", "think", " <think>\nHm, <b>\n</think>\n\nHi\n", (), "Hi\n", "Hm, <b>"),
    Sample("think, without end", "think", "<think>Hm </th", (), "", "Hm </th"),
    Sample("think, none", "think", "\n <thin air", (), "\n <thin air"),
    Sample("magistral", "magistral", "[THINK]Hm[/THINK]Hi", (), "Hi", "Hm"),
)


def parser_of(sample: Sample, *, is_open: bool = False) -> OutputParser:
    """A parser of the sample's form, which is a form of calls or of reasoning."""
    source = Source()
    if sample.form in TOOL_FORMATS:
        return OutputParser(source, TOOL_FORMATS[sample.form].parse(source, FUNCTIONS))

    def steps() -> Any:
        yield from REASONING_FORMATS[sample.form].parse(source, is_open)
        yield from TOOL_FORMATS["hermes"].parse(source, FUNCTIONS)

    return OutputParser(source, steps())


def parsed(parser: OutputParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def whole(events: list[Event]) -> dict[str, Any]:
    """The message that is not streamed, without the ids of its calls."""
    message = ChatMessage(lambda: "id")
    message.add(events)
    return message.to_json()


def streamed(events: list[Event]) -> dict[str, Any]:
    """The message that a client joins from the deltas, each event in a chunk of its own."""
    message = ChatMessage(lambda: "id")
    content, reasoning, calls = "", "", {}
    for event in events:
        delta = message.add([event])
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            function = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            function["name"] += call["function"].get("name", "")
            function["arguments"] += call["function"]["arguments"]
    return {"content": content, "reasoning": reasoning, "calls": calls}

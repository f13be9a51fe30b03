"""Formats and styles of history are found in chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.formats.conversation import CallIds, HistoryStyle, arguments_object, find_style
from cluster.gateway.formats.dialect import Dialect
from cluster.gateway.formats.registry import (
    AUTO,
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from cluster.gateway.openai.model_inputs import check_messages
from tests.unit.cluster.gateway.formats.agent_transcript import turn
from tests.unit.cluster.gateway.formats.chat_templates import TEMPLATES
from tests.unit.cluster.gateway.formats.samples import FUNCTIONS, WEATHER, whole
from tests.unit.cluster.gateway.formats.tool_tokenizers import SPECIAL, marked_tokenizer

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": dict(WEATHER.parameters)}}
USER = {"role": "user", "content": "Is it raining?"}


def tokenizer(name: str, *marks: str) -> Tokenizer:
    return marked_tokenizer(marks, SPECIAL, TEMPLATES[name])


def rendered(name: str, messages: list[dict[str, Any]], *tools: dict[str, Any]) -> str:
    found = tokenizer(name)
    inputs, listed = Dialect(found).template_inputs(messages, tools)
    return found.render_chat(inputs, tools=listed)


def call(index: int, arguments: str = '{"city": "Oslo"}') -> dict[str, Any]:
    return {
        "id": f"call_{index:024}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


def history(num_calls: int = 2) -> list[dict[str, Any]]:
    calls = [call(index, json.dumps({"city": f"City {index}"})) for index in range(num_calls)]
    results = [
        {"role": "tool", "tool_call_id": found["id"], "name": "get_weather", "content": f"rain {index}"}
        for index, found in enumerate(calls)
    ]
    asking = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm."}
    return [USER, asking, *results, USER]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_found_in_the_template(name: str) -> None:
    found = tool_format(AUTO, TEMPLATES[name])
    assert found is not None
    assert found.name == ("hermes" if name == "none" else name)


def test_names_choose_a_form() -> None:
    for name, form in TOOL_FORMATS.items():
        assert tool_format(name, "") is form
    for name, reasoning in REASONING_FORMATS.items():
        assert reasoning_format(name, "") is reasoning
        assert reasoning_format(AUTO, f"… {reasoning.close} …") is reasoning
    assert tool_format("none", TEMPLATES["hermes"]) is None
    assert reasoning_format("none", TEMPLATES["hermes"]) is None
    assert reasoning_format(AUTO, TEMPLATES["none"]) is None


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("hermes", HistoryStyle(ids=CallIds.AS_SENT, one_call=False, arguments_as_text=False, omits_content=True)),
        ("qwen_xml", HistoryStyle(ids=CallIds.AS_SENT, one_call=False, arguments_as_text=False, omits_content=True)),
        ("llama_json", HistoryStyle(ids=CallIds.AS_SENT, one_call=True, arguments_as_text=False, omits_content=True)),
        ("mistral", HistoryStyle(ids=CallIds.SHORT, one_call=False, arguments_as_text=False, omits_content=True)),
        ("kimi", HistoryStyle(ids=CallIds.NAMED, one_call=False, arguments_as_text=False, omits_content=True)),
        ("deepseek_v3", HistoryStyle(ids=CallIds.AS_SENT, one_call=False, arguments_as_text=True, omits_content=False)),
        ("harmony", HistoryStyle(ids=CallIds.AS_SENT, one_call=True, arguments_as_text=False, omits_content=True)),
        ("none", None),
    ],
)
def test_the_style_of_earlier_calls_is_found_by_rendering(name: str, style: HistoryStyle | None) -> None:
    assert find_style(tokenizer(name)) == style


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_results_and_tools_reach_the_prompt(name: str) -> None:
    text = rendered(name, history(), TOOL)
    places = [text.index(part) for part in ("City 0", "rain 0")], [text.index(part) for part in ("City 1", "rain 1")]
    assert all(place == sorted(place) for place in places)
    assert text.count("rain 0") == 1
    assert '"city"' in text.partition("Is it raining?")[0] or name in ("mistral", "llama_json")
    assert '"properties"' in text


def test_parallel_calls_alternate_with_their_results_where_a_message_has_one_call() -> None:
    text = rendered("llama_json", history(3))
    order = [text.index(part) for index in range(3) for part in (f"City {index}", f"rain {index}")]
    assert order == sorted(order)


def test_a_call_without_a_result_is_kept() -> None:
    messages = [message for message in history(3) if message.get("content") != "rain 1"]
    text = rendered("llama_json", messages)
    assert "City 1" in text
    assert "rain 2" in text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", ["", "{}", '{"city": "cut', "[1]", "no JSON", r'{"city": "\ud83d"}'])
def test_arguments_of_all_kinds_are_rendered(name: str, arguments: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Ok.", "tool_calls": [call(1, arguments)]}]
    text = rendered(name, messages)
    assert "get_weather" in text
    assert text.encode()


def test_escapes_in_arguments_reach_the_template() -> None:
    assert arguments_object(r'{"a": "\ud83d\ude00", "b": "\u00e9"}') == {"a": "\U0001f600", "b": "é"}
    assert arguments_object(r'{"a": "\ud83d"}') == {"a": "\ufffd"}


def test_a_template_without_tools_gets_a_prompt_in_the_hermes_form() -> None:
    text = rendered("none", [{"role": "system", "content": "Be brief."}, *history()], TOOL)
    assert "Be brief.\n\n# Tools" in text
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "City 1"}}\n</tool_call>' in text
    assert (
        "user\n<tool_response>\nrain 0\n</tool_response>\n<tool_response>\nrain 1\n</tool_response><|im_end|>" in text
    )
    assert text.count("<|im_start|>system") == 1


def test_a_template_that_only_knows_calls_gets_the_tools_and_an_example_of_its_form() -> None:
    text = rendered("deepseek_v3", history(1), TOOL)
    assert "<｜tool▁call▁begin｜>function<｜tool▁sep｜><function-name>" in text
    assert text.index("# Tools") < text.index("City 0")


def test_ids_of_calls_fit_the_template() -> None:
    for name, length in (("hermes", 29), ("mistral", 9)):
        dialect = Dialect(tokenizer(name))
        assert {len(dialect.new_call_id()) for _ in range(5)} == {length}
    text = rendered("mistral", history(1))
    (written,) = {part.split('"')[0] for part in text.split('"id": "')[1:]}
    assert f"{written}[/TOOL_RESULTS]" in text


def test_ids_name_the_function_where_the_template_writes_only_ids() -> None:
    text = rendered("kimi", [*history(2), *history(1)[1:]])
    for index, city in enumerate(["City 0", "City 1"]):
        assert f'functions.get_weather:{index}<|tool_call_argument_begin|>{{"city": "{city}"}}' in text
        assert f"## Return of functions.get_weather:{index}\nrain {index}" in text


def test_marks_that_are_special_tokens_reach_the_parser_only() -> None:
    found = tokenizer("hermes", "<tool_call>", "</tool_call>", "<think>", "</think>", "<other>")
    dialect = Dialect(found)
    shown = {found.token_text(token_id) for token_id in dialect.shown_token_ids()}
    assert shown == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    text = '<other><think>Hm.</think>Ok.<tool_call>{"name": "now"}</tool_call><other>'
    detokenizer = found.detokenizer(shown_token_ids=dialect.shown_token_ids())
    parser = dialect.parser(FUNCTIONS, "")
    events = [event for token in found.encode(text) for event in parser.push_token(detokenizer.push_one(token))]
    message = whole(events + parser.finish())
    assert (message["content"], message["reasoning_content"]) == ("Ok.", "Hm.")
    assert [found["function"]["name"] for found in message["tool_calls"]] == ["now"]


def test_reasoning_that_the_template_begins_is_found_in_the_prompt() -> None:
    found = tokenizer("deepseek_v3")
    dialect = Dialect(found)
    end = dialect.prompt_end(found.apply_chat_template([USER]))
    parser = dialect.parser((), end)
    message = whole(parser.push("Hm.\n</think>\n\nYes.") + parser.finish())
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


def test_tokens_of_reasoning_are_counted_with_their_marks() -> None:
    parser = Dialect(tokenizer("hermes")).parser((), "")
    for text in ("<think>", "\n", "H", "m", "</think>", "\n\n", "Y", "es"):
        parser.push_token(text)
    assert parser.num_reasoning_tokens == 5


@pytest.mark.parametrize("name", TEMPLATES)
def test_forty_turns_of_a_coding_agent_are_rendered_by_every_template(name: str) -> None:
    messages = check_messages([message for index in range(40) for message in turn(index)])
    text = rendered(name, messages, TOOL)
    assert all(text.count(f"Step {index}\n") == 1 for index in range(40))
    assert text.count("src/0.py") == 40
    assert text.count("src/3.py") == 10

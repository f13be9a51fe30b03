"""What agents and everyday clients send beside OpenAI's letter is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from cluster.gateway.openai.model_inputs import check_messages, split_prompts
from cluster.gateway.openai.plan import GatewayLimits, Planner
from cluster.gateway.openai.prompt_encoder import PromptEncoder
from cluster.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest, parse_request
from cluster.gateway.openai.structured import asked_grammar
from cluster.gateway.openai.tool_use import resolve_tools
from cluster.gateway.work_threads import WorkThreads
from tests.unit.cluster.gateway.test_openai_api import CARD, PLANNER, TOKENIZER, chat, plan_chat, plan_completion


async def test_whole_numbers_may_be_written_as_floats() -> None:
    numbers = {"max_tokens": 64.0, "n": 2.0, "seed": 7.0, "top_k": 5.0, "stop_token_ids": [3.0], "top_logprobs": 2.0}
    plan = await plan_chat(logprobs=True, **numbers)
    params = plan.prompts[0].params
    assert (params.seed, params.top_k, params.stop_token_ids, params.logprobs) == (7, 5, (3,), 2)
    assert plan.num_choices == 2
    for value in (2.5, 1e300, 2.0**60):
        with pytest.raises(InvalidRequestError, match=r"n must be (an integer|between)"):
            await plan_chat(n=value)


async def test_a_chat_may_ask_for_more_than_the_context_has_left() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        prompt = (await plan_chat(**{name: 10**9})).prompts[0]
        assert len(prompt.token_ids) + prompt.params.max_tokens == CARD.max_model_len


async def test_no_model_means_the_served_one() -> None:
    request = parse_request(ChatCompletionRequest, {"messages": [{"role": "user", "content": "hello"}]})
    assert (await PLANNER.plan_chat(request, CARD)).prompts[0].token_ids
    assert parse_request(CompletionRequest, {"prompt": "a"}).model is None


async def test_prompts_are_truncated_from_the_left() -> None:
    whole = TOKENIZER.encode("hello world, hello")
    for limit, expected in ((3, whole[-3:]), (1000, whole), (-1, whole)):
        plan = await plan_completion(prompt="hello world, hello", truncate_prompt_tokens=limit)
        assert list(plan.prompts[0].token_ids) == expected
    long = await plan_completion(prompt=[1] * 500, truncate_prompt_tokens=-1)
    assert len(long.prompts[0].token_ids) == CARD.max_model_len - 16  # the default of max_tokens
    chat_plan = await plan_chat(truncate_prompt_tokens=2)
    assert chat_plan.prompts[0].token_ids == (await plan_chat()).prompts[0].token_ids[-2:]


def test_stream_options_without_a_stream_have_no_effect() -> None:
    assert not chat(stream_options={"include_usage": True}).stream


@pytest.mark.parametrize(
    ("effort", "given", "expected"),
    [
        (None, None, {}),
        ("high", None, {"reasoning_effort": "high"}),
        ("none", None, {"reasoning_effort": "none", "enable_thinking": False}),
        ("none", {"enable_thinking": True}, {"reasoning_effort": "none", "enable_thinking": True}),
    ],
)
def test_the_reasoning_effort_reaches_the_template(effort: str | None, given: Any, expected: dict[str, Any]) -> None:
    assert chat(reasoning_effort=effort, chat_template_kwargs=given).template_kwargs == expected


async def test_more_choices_than_the_router_runs_are_refused() -> None:
    planner = Planner(PromptEncoder(TOKENIZER, WorkThreads()), GatewayLimits(max_inflight=4))
    with pytest.raises(InvalidRequestError, match=r"8 sequences .* most 4 at a time \(router\.max_inflight\)"):
        await planner.plan_chat(chat(n=8), CARD)
    assert (await planner.plan_chat(chat(n=4), CARD)).num_choices == 4


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": []}, {"content": ""}),
        ({"content": "a", "tool_calls": [], "function_call": None, "audio": None, "annotations": []}, {"content": "a"}),
        ({"content": None, "refusal": "I cannot."}, {"content": "I cannot."}),
        ({"content": "a", "refusal": None, "annotations": [{"type": "url_citation"}]}, {"content": "a"}),
        ({"content": "a", "reasoning_content": "hm"}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": "a", "reasoning": "hm", "reasoning_content": None}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": "a", "cache_control": {"type": "ephemeral"}, "name": None}, {"content": "a"}),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, {"content": "a"}),
        ({"content": "a", "id": "msg_1", "parsed": {"b": 1}, "provider_specific_fields": {"c": 2}}, {"content": "a"}),
        ({"content": "a", "reasoning_details": [{"text": "hm"}], "thinking_blocks": [{}]}, {"content": "a"}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}, {"content": "a\nb"}),
    ],
)
def test_turns_that_agents_send_back_are_accepted(turn: dict[str, Any], expected: dict[str, str]) -> None:
    assert check_messages([{"role": "assistant", **turn}]) == [{"role": "assistant", **expected}]


def test_no_calls_are_accepted_of_anyone() -> None:
    turn = {"role": "user", "content": "a", "tool_calls": []}
    assert check_messages([turn]) == [{"role": "user", "content": "a"}]


def test_null_means_absent_under_any_name() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "x": None}, "index": None}
    parts = [{"type": "text", "text": "a", "cache_control": None, "y": None}]
    given = [
        {"role": "user", "content": parts, "prefix": None, "zzz": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "z": None}], "tool_call_id": None},
        {"role": "tool", "tool_call_id": "1", "content": "b", "refusal": None},
    ]
    assert [sorted(message) for message in check_messages(given)] == [
        ["content", "role"], ["content", "role", "tool_calls"], ["content", "name", "role", "tool_call_id"]
    ]  # fmt: skip
    formats: list[dict[str, Any]] = [{"type": "text"}, {"type": "json_schema", "json_schema": {"schema": {}}}]
    options = {"stream_options": {"include_usage": True, "zzz": None}, "speculation": {"trace": None, "zzz": None}}
    for wanted in formats:
        assert asked_grammar(chat(response_format={**wanted, "zzz": None})) == asked_grammar(
            chat(response_format=wanted)
        )
    assert chat(**options, logit_bias={"5": None, "6": 1}).logit_bias == {"6": 1}
    function = {"name": "f", "parameters": None, "zzz": None}
    request = chat(best_of=None, zzz=None, tools=[{"type": "function", "function": function, "zzz": None}])
    assert resolve_tools(request).functions[0].name == "f"
    with pytest.raises(InvalidRequestError, match="zzz"):
        check_messages([{"role": "user", "content": "a", "zzz": 1}])


def test_what_clients_add_to_messages_and_calls_is_ignored() -> None:
    fields = {"provider_specific_fields": {"signature": "a"}}
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"b": 1}, **fields}
    call = {"id": "1", "type": "function", "function": function, **fields}
    given = [
        {"role": "user", "content": "a", "id": "m1", "annotations": [], **fields},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b", "id": "m2"},
    ]
    user, assistant, tool = check_messages(given)
    assert user == {"role": "user", "content": "a"}
    assert assistant["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert tool == {"role": "tool", "tool_call_id": "1", "content": "b", "name": "f"}


def test_token_ids_may_be_written_as_floats() -> None:
    assert split_prompts([1.0, 2]) == [[1, 2]]
    assert split_prompts([[1.0], [2, 3.0]]) == [[1], [2, 3]]
    with pytest.raises(InvalidRequestError, match="entry 1 is a number"):
        split_prompts([1, 2.5])


def test_integers_without_effect_may_be_written_as_floats() -> None:
    assert chat(priority=1.0, stream_interval=2.0, thinking_token_budget=-1.0)
    with pytest.raises(InvalidRequestError, match="priority must be an integer"):
        chat(priority=1.5)


async def test_a_truncated_prompt_leaves_room_for_the_answer() -> None:
    ids = list(range(1, 10)) * 50
    plan = await plan_completion(prompt=ids, truncate_prompt_tokens=-1, max_tokens=4)
    assert plan.prompts[0].params.max_tokens == 4
    context = len(plan.prompts[0].token_ids) + 4
    assert list(plan.prompts[0].token_ids) == ids[-(context - 4) :]
    default = await plan_completion(prompt=ids, truncate_prompt_tokens=-1)
    assert (len(default.prompts[0].token_ids), default.prompts[0].params.max_tokens) == (context - 16, 16)
    chat = await plan_chat(truncate_prompt_tokens=-1, max_tokens=context - 3)
    assert (len(chat.prompts[0].token_ids), chat.prompts[0].params.max_tokens) == (3, context - 3)


async def test_echo_and_truncation_contradict_each_other() -> None:
    with pytest.raises(UnsupportedParameterError, match="truncate_prompt_tokens cannot be combined with echo"):
        await plan_completion(prompt="one two", truncate_prompt_tokens=1, echo=True)

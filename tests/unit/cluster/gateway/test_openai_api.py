"""Parameters, prompts, plans and response bodies, without HTTP."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion, completion_create_params
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat import (
    completion_create_params as chat_completion_create_params,
)

from baton.core.errors import InvalidRequestError
from baton.core.request import SEED_LIMIT, FinishReason, TokenLogprobs
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.model_inputs import check_messages, choice_seed, resolve_seed
from cluster.gateway.openai.parameter_table import parameters_of
from cluster.gateway.openai.parameters import CHAT
from cluster.gateway.openai.plan import GatewayLimits, GenerationPlan, Planner
from cluster.gateway.openai.prompt_encoder import PromptEncoder
from cluster.gateway.openai.prompt_logprobs import MIN_LOGPROB
from cluster.gateway.openai.responses import ChatFormat, ChoiceOutput, CompletionFormat, Usage
from cluster.gateway.openai.schemas import BaseRequest, ChatCompletionRequest, CompletionRequest, parse_request
from cluster.gateway.output_processor import OutputDelta, TokenEntry
from cluster.gateway.work_threads import WorkThreads
from cluster.requests.generation import ModelCard
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
CARD = ModelCard(name="m", max_model_len=64, vocab_size=TOKENIZER.vocab_size, created_unix_s=0)
PLANNER = Planner(PromptEncoder(TOKENIZER, WorkThreads()), GatewayLimits())
HELLO = [{"role": "user", "content": "hello"}]


def documented(module: Any) -> set[str]:
    """Every request key that the official package documents for an endpoint."""
    variants = [
        module.CompletionCreateParamsBase,
        module.CompletionCreateParamsNonStreaming,
        module.CompletionCreateParamsStreaming,
    ]
    return {key for variant in variants for key in typing.get_type_hints(variant)}


@pytest.mark.parametrize(
    ("module", "schema"),
    [(completion_create_params, CompletionRequest), (chat_completion_create_params, ChatCompletionRequest)],
    ids=["completions", "chat"],
)
def test_every_documented_parameter_is_in_the_table(module: Any, schema: type[BaseRequest]) -> None:
    keys = documented(module)
    assert len(keys) > 15
    assert keys - parameters_of(schema.endpoint).keys() == set()


def test_documented_stream_options_are_known() -> None:
    known = set(ChatCompletionRequest.model_fields) | {"include_usage", "include_obfuscation"}
    assert set(typing.get_type_hints(ChatCompletionStreamOptionsParam)) <= known


def chat(**changes: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, {"model": "m", "messages": HELLO, **changes})


def completion(**changes: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, {"model": "m", "prompt": "hello", **changes})


async def plan_chat(**changes: Any) -> GenerationPlan:
    return await PLANNER.plan_chat(chat(**changes), CARD)


async def plan_completion(**changes: Any) -> GenerationPlan:
    return await PLANNER.plan_completion(completion(**changes), CARD)


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (
            {"eagle3"},
            "the loaded draft is for eagle3. Choose one of auto, none, eagle3, lookahead, ngram, suffix,",
        ),
        ((), "no draft is loaded. Choose one of auto, none, lookahead, ngram, suffix, or start the cluster"),
    ],
)
async def test_a_method_without_its_draft_is_refused_with_the_available_ones(
    loaded: Iterable[str], reason: str
) -> None:
    request = chat(speculation={"method": "medusa"})
    with pytest.raises(InvalidRequestError) as caught:
        await PLANNER.plan_chat(request, replace(CARD, draft_methods=frozenset(loaded)))
    assert reason in caught.value.message
    assert "start the cluster with a draft for medusa (speculation.draft)" in caught.value.message
    assert (await PLANNER.plan_chat(request, replace(CARD, draft_methods=frozenset({"medusa"})))).speculation_method


@pytest.mark.parametrize("name", sorted(parameters_of(CHAT).keys() - {"messages", "model"}))
def test_null_means_absent(name: str) -> None:
    assert chat(**{name: None}) == chat()


def test_the_nearest_known_name_is_suggested() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'max_tokens'"):
        check_known(["max_token"], CompletionRequest.model_fields)


def test_a_class_in_the_body_is_refused_with_the_right_place() -> None:
    with pytest.raises(InvalidRequestError, match="with 'service_tier', with the header X-Baton-SLO-Class"):
        check_known(["slo_class"], CompletionRequest.model_fields)


async def test_requests_of_load_clients_are_accepted() -> None:
    from_vllm = await plan_completion(
        temperature=0.0,
        repetition_penalty=1.0,
        max_tokens=8,
        logprobs=None,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
    )
    assert from_vllm.include_usage
    assert from_vllm.prompts[0].params.ignore_eos
    assert from_vllm.prompts[0].params.is_greedy
    from_guidellm = await plan_chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        max_completion_tokens=8,
        stop=None,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert from_guidellm.continuous_usage
    assert from_guidellm.prompts[0].params.max_tokens == 8


async def test_every_sampling_parameter_reaches_the_engine() -> None:
    plan = await plan_chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias={"5": -100, "6": 1.5}, stop_token_ids=[3, 3], ignore_eos=True, min_tokens=2,
        max_tokens=9, logprobs=True, top_logprobs=4, seed=11, stop="x", include_stop_str_in_output=True,
        skip_special_tokens=False, n=3,
    )  # fmt: skip
    params = plan.prompts[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (params.logit_bias, params.stop_token_ids) == (((5, -100.0), (6, 1.5)), (3,))
    assert (params.ignore_eos, params.min_tokens, params.max_tokens) == (True, 2, 9)
    assert (params.logprobs, params.seed) == (4, 11)
    assert (plan.stop.strings, plan.stop.include_in_output, plan.stop.min_tokens) == (("x",), True, 2)
    assert (plan.skip_special_tokens, plan.num_choices) == (False, 3)


async def test_the_default_max_tokens_follows_openai_or_the_remaining_context() -> None:
    assert (await plan_completion()).prompts[0].params.max_tokens == 16
    tight = (await plan_completion(prompt=[1] * 60)).prompts[0]
    assert tight.params.max_tokens == 4
    whole = (await plan_chat()).prompts[0]
    assert len(whole.token_ids) + whole.params.max_tokens == CARD.max_model_len


async def test_all_forms_of_prompts_are_accepted() -> None:
    hello = tuple(TOKENIZER.encode("hello"))
    for prompt, expected in [
        ("hello", [hello]),
        ([1, 2], [(1, 2)]),
        (["hello", "hello"], [hello, hello]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ]:
        assert [item.token_ids for item in (await plan_completion(prompt=prompt)).prompts] == expected


async def test_chats_are_rendered_with_the_template() -> None:
    (prompt,) = (await plan_chat(messages=[{"role": "developer", "content": "be brief"}, *HELLO])).prompts
    text = TOKENIZER.decode(prompt.token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert text.endswith("<|im_start|>assistant\n")


async def test_long_texts_are_tokenized_like_short_ones() -> None:
    long_card = ModelCard(name="m", max_model_len=10**6, vocab_size=TOKENIZER.vocab_size, created_unix_s=0)
    text = "hello world " * 1000
    plan = await PLANNER.plan_completion(completion(prompt=text), long_card)
    assert list(plan.prompts[0].token_ids) == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    ("changes", "is_much"),
    [
        ({"prompt": ["hello"] * 10}, False),
        ({"prompt": ["hello world "] * 400}, True),
        ({"prompt": [[40] * 20] * 400}, False),
        ({"prompt": [[40] * 20] * 400, "echo": True}, True),
    ],
    ids=["few texts", "many texts", "token ids", "token ids to echo"],
)
async def test_large_texts_are_tokenized_off_the_loop_in_any_number_of_prompts(
    changes: dict[str, Any], is_much: bool
) -> None:
    in_threads = []

    class Threads(WorkThreads):
        async def run(self, size: int, function: Any, *args: Any) -> Any:
            in_threads.append(function)
            return function(*args)

    plan = await Planner(PromptEncoder(TOKENIZER, Threads()), GatewayLimits()).plan_completion(
        completion(**changes), CARD
    )
    assert len(plan.prompts) == len(changes["prompt"])
    assert len(in_threads) == is_much


def test_messages_of_earlier_answers_can_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    assert check_messages([answer]) == [{"role": "assistant", "content": "hi"}]


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts, "name": "x"}]) == [
        {"role": "user", "content": "a\nb", "name": "x"}
    ]


def test_seeds_map_to_63_bits_and_differ_by_choice() -> None:
    assert resolve_seed(5) == 5
    assert resolve_seed(-1) == SEED_LIMIT - 1
    assert resolve_seed(-(2**63)) == 0
    assert resolve_seed(None) != resolve_seed(None)
    seeds = [choice_seed(5, choice) for choice in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 100
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)
    assert seeds == [choice_seed(5, choice) for choice in range(100)]


async def test_prompts_without_a_seed_do_not_share_one() -> None:
    first, second = (await plan_completion(prompt=["a", "a"])).prompts
    assert first.params.seed != second.params.seed
    first, second = (await plan_completion(prompt=["a", "a"], seed=3)).prompts
    assert first.params.seed == second.params.seed == 3


def entry(text: str, offset: int, logprob: float = -0.5) -> TokenEntry:
    (token_id,) = TOKENIZER.encode(text, add_special_tokens=False)
    return TokenEntry(token_id, offset, TokenLogprobs(logprob, ((token_id, logprob), (65, float("-inf")))))


def roundtrip(body: dict[str, Any]) -> Any:
    """Strict JSON, as a client reads it."""
    return json.loads(json.dumps(body, allow_nan=False))


def test_completions_validate_against_the_official_type() -> None:
    output = CompletionFormat("cmpl-1", "m", TOKENIZER, with_logprobs=True, echo_texts=[""])
    choice = ChoiceOutput(0)
    choice.add(OutputDelta("hello", (entry("hello", 0),)))
    choice.add(OutputDelta("", (), FinishReason.STOP))
    body = Completion.model_validate(roundtrip(output.whole([choice], Usage(3, 2, 1))), strict=True)
    assert (body.choices[0].text, body.choices[0].finish_reason) == ("hello", "stop")
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["hello"], [-0.5], [0])
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"hello": -0.5, TOKENIZER.token_text(65): MIN_LOGPROB}
    assert body.usage is not None
    assert (body.usage.total_tokens, body.usage.prompt_tokens_details.cached_tokens) == (5, 1)  # type: ignore[union-attr]


def test_incomplete_characters_are_written_as_openai_does() -> None:
    token_id = next(token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token) == b"\xe2")
    output = CompletionFormat("cmpl-1", "m", TOKENIZER, with_logprobs=True, echo_texts=[""])
    delta = OutputDelta("", (TokenEntry(token_id, 0, TokenLogprobs(-1.0)),))
    chunk = output.choice_chunk(0, delta, is_first=True)
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe2"]


def test_chat_completions_validate_against_the_official_types() -> None:
    output = ChatFormat("chatcmpl-1", "m", TOKENIZER, with_logprobs=True, new_call_id=lambda: "call_1")
    first = OutputDelta("hello", (entry("hello", 0),))
    last = OutputDelta("", (), FinishReason.LENGTH)
    choice = ChoiceOutput(0)
    choice.add(first)
    choice.add(last)
    body = ChatCompletion.model_validate(roundtrip(output.whole([choice], Usage(1, 2))), strict=True)
    assert body.choices[0].message.content == "hello"
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes == list(b"hello")
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, MIN_LOGPROB]
    chunks = [output.choice_chunk(0, first, is_first=True), output.choice_chunk(0, last, is_first=False)]
    parsed = [ChatCompletionChunk.model_validate(roundtrip(chunk), strict=True) for chunk in chunks]
    assert (parsed[0].choices[0].delta.role, parsed[0].choices[0].delta.content) == ("assistant", "hello")
    assert (parsed[1].choices[0].delta.content, parsed[1].choices[0].finish_reason) == (None, "length")
    usage = ChatCompletionChunk.model_validate(roundtrip(output.usage_chunk(Usage(1, 2))), strict=True)
    assert usage.choices == []

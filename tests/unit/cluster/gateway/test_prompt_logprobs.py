"""Log probabilities of prompts in the answers of both endpoints."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from baton.core.prompt_logprobs import PromptLogprobs
from baton.core.request import FinishReason, TokenLogprobs
from cluster.gateway.openai.plan import MAX_PROMPT_LOGPROBS
from cluster.gateway.openai.prompt_logprobs import MIN_LOGPROB, describe_prompt
from cluster.requests.generation import GenerationRequest, TokenChunk
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import CONTEXT_LENGTH, FakeGenerator, Step

TOKENIZER = byte_level_tokenizer()
TEXT = "hello world"
PROMPT = TOKENIZER.encode(TEXT)
OTHER = 65
"""The second most likely token everywhere."""


def logprobs_of(request: GenerationRequest) -> PromptLogprobs | None:
    """The token at position i has the log probability -i and the rank 1; the next token is -i - 0.5."""
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    found = PromptLogprobs.of_prompt(len(request.prompt_token_ids), num_top)
    found.logprobs[:] = -np.arange(1, len(request.prompt_token_ids))
    found.ranks[:] = 1
    for place, tokens in enumerate((request.prompt_token_ids[1:], [OTHER] * len(found))[:num_top]):
        found.top_ids[:, place] = tokens
        found.top_logprobs[:, place] = found.logprobs - place / 2
    return found


@pytest.fixture
def generator() -> FakeGenerator:
    """Continues every prompt with as many "a" as it may."""
    (token_id,) = TOKENIZER.encode("a", add_special_tokens=False)

    def script(request: GenerationRequest) -> list[Step]:
        count = request.params.max_tokens
        logprobs = None if request.params.logprobs is None else (TokenLogprobs(-0.5),)
        ends = [None] * (count - 1) + [FinishReason.LENGTH]
        prompts = [logprobs_of(request)] + [None] * (count - 1)
        return [
            TokenChunk((token_id,), logprobs, end, prompt_logprobs=found)
            for end, found in zip(ends, prompts, strict=True)
        ]

    return FakeGenerator(TOKENIZER, script)


async def ask(http: httpx.AsyncClient, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
    """The answer, or the chunks of a stream."""
    answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def error(http: httpx.AsyncClient, path: str = "completions", **body: Any) -> tuple[str, str]:
    answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [TEXT, PROMPT], ids=["text", "token ids"])
async def test_echo_with_logprobs_shows_the_prompt_before_the_output(http: httpx.AsyncClient, prompt: Any) -> None:
    [answer] = await ask(http, prompt=prompt, echo=True, logprobs=1, max_tokens=2)
    [choice] = answer["choices"]
    assert choice["text"] == TEXT + "aa"
    logprobs, count = choice["logprobs"], len(PROMPT)
    assert "".join(logprobs["tokens"]) == TEXT + "aa"
    assert logprobs["token_logprobs"] == [None, *(-float(i) for i in range(1, count)), -0.5, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {TOKENIZER.token_text(PROMPT[1]): -1.0}]
    ends = [start + len(token) for start, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert [0, *ends] == [*logprobs["text_offset"], len(TEXT) + 2]
    assert answer["usage"]["completion_tokens"] == 2
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_may_be_generated(http: httpx.AsyncClient, generator: FakeGenerator, stream: bool) -> None:
    found = await ask(http, prompt=[TEXT, TEXT], echo=True, logprobs=0, max_tokens=0, stream=stream)
    assert [request.params.max_tokens for request in generator.requests] == [1, 1]
    for index in (0, 1):
        [choice] = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, len(PROMPT)))]
    if not stream:
        assert found[0]["usage"]["completion_tokens"] == 0


async def test_each_choice_has_them_but_one_sequence_computes_them(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    for stream in (False, True):
        generator.requests.clear()
        chunks = await ask(http, prompt=PROMPT, echo=True, logprobs=1, max_tokens=2, n=3, stream=stream)
        assert sorted(request.params.prompt_logprobs is None for request in generator.requests) == [False, True, True]
        for index in range(3):
            first, *more = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert first["logprobs"]["token_logprobs"][: len(PROMPT)][:2] == [None, -1.0]
            assert all(len(choice["logprobs"]["tokens"]) <= 1 for choice in more)
            last = [first, *more][-1]["logprobs"]["text_offset"]
            assert not last or last[-1] == len(TEXT) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_are_listed_by_token_id(http: httpx.AsyncClient, stream: bool) -> None:
    completion, *rest = await ask(http, prompt=PROMPT, prompt_logprobs=2, max_tokens=2, stream=stream)
    assert all("prompt_logprobs" not in choice for chunk in rest for choice in chunk["choices"])
    [choice] = completion["choices"]
    assert choice["logprobs"] is None
    assert len(choice["prompt_logprobs"]) == len(PROMPT)
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        str(PROMPT[1]): {"logprob": -1.0, "rank": 1, "decoded_token": TOKENIZER.token_text(PROMPT[1])},
        str(OTHER): {"logprob": -1.5, "rank": 2, "decoded_token": TOKENIZER.token_text(OTHER)},
    }
    message = {"role": "user", "content": TEXT}
    chat, *rest = await ask(
        http, "chat/completions", messages=[message], prompt_logprobs=0, max_tokens=2, stream=stream
    )
    assert all("prompt_logprobs" not in chunk for chunk in rest)
    assert chat["prompt_logprobs"][0] is None
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (len(chat["prompt_logprobs"]) - 1)


async def test_the_larger_number_is_computed_and_each_form_shows_its_own(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    [answer] = await ask(http, prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=2, max_tokens=0)
    assert generator.requests[0].params.prompt_logprobs == 2
    [choice] = answer["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1}
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {2}


async def test_their_number_is_bounded(http: httpx.AsyncClient) -> None:
    assert await error(http, prompt=PROMPT, prompt_logprobs=21) == (
        "prompt_logprobs",
        "prompt_logprobs must be an integer between 0 and 20, got 21.",
    )
    assert (await error(http, prompt=PROMPT, echo=True, logprobs=-1))[0] == "logprobs"
    assert (await error(http, prompt=PROMPT, max_tokens=0))[0] == "max_tokens"
    assert (await error(http, "chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=0,
                        prompt_logprobs=1))[0] == "max_tokens"  # fmt: skip
    long = [[40] * (CONTEXT_LENGTH - 20)] * 128
    param, message = await error(http, prompt=long, prompt_logprobs=20)
    assert param == "prompt_logprobs"
    assert f"{128 * 108 * 21} log probabilities of prompts, but {MAX_PROMPT_LOGPROBS} are the limit" in message


def test_special_tokens_and_impossible_ones_have_a_form() -> None:
    special = next(token for token in range(TOKENIZER.vocab_size) if TOKENIZER.is_special(token))
    token_ids = [special, *PROMPT]
    found = PromptLogprobs.of_prompt(len(token_ids), 0)
    found.logprobs[0] = -np.inf
    hidden = describe_prompt(token_ids, TEXT, found, TOKENIZER, 0, None).echoed
    assert hidden is not None
    assert hidden.text_offset[:2] == [0, 0]
    assert hidden.token_logprobs[:2] == [None, MIN_LOGPROB]
    mark = TOKENIZER.token_text(special)
    shown = describe_prompt(token_ids, mark + TEXT, found, TOKENIZER, 0, None).echoed
    assert shown is not None
    assert shown.text_offset[:2] == [0, len(mark)]

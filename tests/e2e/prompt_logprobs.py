"""Tests of the log probabilities of prompts, which a module with a cluster runs."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from baton.engine.models.default_model import ensure_default_model
from baton.engine.models.tokenizer import Tokenizer
from tests.running_cluster import MODEL
from tests.scored_prompts import load_reference, log_softmax_of, own_logprobs


class PromptLogprobs:
    @pytest.mark.parametrize("stream", [False, True])
    def test_log_probabilities_of_prompts_are_those_of_the_model(
        self, client: OpenAI, tokenizer: Tokenizer, stream: bool
    ) -> None:
        """As lm_eval asks: several prompts as token ids. One has more tokens than a step may score."""
        texts = ["The capital of France is Paris.", " ".join(f"{n} and {n + 1} are" for n in range(60))]
        prompts = [tokenizer.encode(text) for text in texts]
        ask: Any = {"model": MODEL, "prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0, "seed": 1}
        reference = load_reference(ensure_default_model())
        for extra in ({"max_tokens": 0}, {"max_tokens": 3, "n": 2, "extra_body": {"prompt_logprobs": 1}}):
            answers: dict[int, Any] = {}
            found = client.completions.create(**ask, **extra, stream=stream)
            for chunk in found if stream else [found]:
                for choice in chunk.choices:
                    answers.setdefault(choice.index, choice)
            assert len(answers) == len(prompts) * extra.get("n", 1)
            for index, choice in answers.items():
                number = index // extra.get("n", 1)
                prompt, expected = prompts[number], log_softmax_of(reference, prompts[number])
                own, count = own_logprobs(expected, prompts[number]), len(prompts[number])
                logprobs = choice.logprobs
                assert choice.text.startswith(texts[number])
                assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
                assert logprobs.token_logprobs[1:count] == pytest.approx(own, abs=1e-3)
                best = [max(top.values()) for top in logprobs.top_logprobs[1:count]]
                assert best == pytest.approx(expected.amax(dim=-1).tolist(), abs=1e-3)
                places = zip(logprobs.text_offset[:count], logprobs.tokens[:count], strict=True)
                assert all(texts[number].startswith(token, start) for start, token in places)
                listed = getattr(choice, "prompt_logprobs", None)
                if "extra_body" in extra:
                    assert [entry[str(t)]["logprob"] for entry, t in zip(listed[1:], prompt[1:], strict=True)] == (
                        logprobs.token_logprobs[1:count]
                    )
                else:
                    assert listed is None
                    assert len(logprobs.tokens) == count

    def test_chats_list_the_log_probabilities_of_their_prompt(self, client: OpenAI, tokenizer: Tokenizer) -> None:
        messages: Any = [{"role": "user", "content": "Name a colour."}]
        answer: Any = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=2, temperature=0, extra_body={"prompt_logprobs": 0}
        )
        prompt = tokenizer.apply_chat_template(messages)
        expected = own_logprobs(log_softmax_of(load_reference(ensure_default_model()), prompt), prompt)
        assert answer.prompt_logprobs[0] is None
        found = [next(iter(entry.items())) for entry in answer.prompt_logprobs[1:]]
        assert [int(token_id) for token_id, _ in found] == prompt[1:]
        assert [entry["logprob"] for _, entry in found] == pytest.approx(expected, abs=1e-3)

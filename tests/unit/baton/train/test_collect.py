"""Collecting answers: choice of prompts, resuming, and the error for an empty result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError, InternalError
from baton.core.request import FinishReason, TokenOutput
from baton.engine.engine import Engine
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.models.tokenizer import Tokenizer
from baton.train import collect
from baton.train.collect import Collector, CollectSettings
from baton.train.dataset import AnswerDataset
from baton.train.prompts import ChatFormat, PlainFormat, PromptFormat, Turns
from baton.train.stopping import StoppedError
from baton.train.target_engine import answering_engine
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.baton.train.conftest import sharp_target

PROMPTS = tuple((f"hello {word} {number}",) for word in ("fox", "dog", "lazy") for number in range(6))
Collect = Callable[..., AnswerDataset]


@pytest.fixture(scope="module")
def speaker() -> LoadedModel:
    """A target with a token for each one of the tokenizer."""
    return prepare_model(sharp_target(vocab=byte_level_tokenizer().vocab_size), "float32")


@pytest.fixture
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat.of(tokenizer)


@pytest.fixture
def collect_answers(tmp_path: Path, speaker: LoadedModel) -> Collect:
    def run(chat: PromptFormat, prompts: Sequence[Turns] = PROMPTS, **options: Any) -> AnswerDataset:
        hooks = {name: options.pop(name) for name in ("report", "stop") if name in options}
        defaults = {"num_tokens": 400, "max_answer_tokens": 16, "max_prompt_tokens": 60, "self_prompt_share": 0.0}
        settings = CollectSettings(**{**defaults, "batch_size": 6, **options})
        dataset = AnswerDataset(tmp_path / "answers", {"target": speaker.fingerprint})
        with answering_engine(speaker, settings) as engine:
            Collector(engine, chat, speaker.eos_token_ids, prompts, dataset, settings, **hooks).run()
        return dataset

    return run


def greedy_answer(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    tokens = list(prompt)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for _ in range(length):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_answers_come_from_the_target(collect_answers: Collect, chat: ChatFormat, speaker: LoadedModel) -> None:
    told: list[int] = []
    dataset = collect_answers(chat, temperatures=(0.0,), report=told.append)
    assert dataset.num_answer_tokens >= 400
    assert told == sorted(told)
    assert told[-1] >= 400
    known = {chat.prompt(*turns) for turns in PROMPTS}
    for sample in list(dataset)[:3]:
        prompt = sample.token_ids[: sample.num_prompt_tokens]
        assert prompt in known
        answer = list(sample.token_ids[sample.num_prompt_tokens :])
        assert answer == greedy_answer(speaker.model, prompt, len(answer))


def test_temperatures_alternate(collect_answers: Collect, chat: ChatFormat, speaker: LoadedModel) -> None:
    dataset = collect_answers(chat, temperatures=(0.0, 1.0), num_tokens=250)
    greedy = [
        list(sample.token_ids[sample.num_prompt_tokens :])
        == greedy_answer(speaker.model, sample.token_ids[: sample.num_prompt_tokens], sample.num_answer_tokens)
        for sample in dataset
    ]
    assert 0.3 < sum(greedy) / len(greedy) < 0.7


def test_interrupted_collection_keeps_its_answers_and_resumes(collect_answers: Collect, chat: ChatFormat) -> None:
    told: list[int] = []
    with pytest.raises(StoppedError):
        collect_answers(chat, report=told.append, stop=lambda: len(told) >= 7)
    more: list[int] = []
    dataset = collect_answers(chat, report=more.append)
    assert more[0] > told[-1] >= 7 * 8
    assert dataset.num_answer_tokens == more[-1]
    assert len(dataset) == len(told) + len(more)


def test_a_model_without_a_template_gets_plain_prompts(collect_answers: Collect, tokenizer: Tokenizer) -> None:
    dataset = collect_answers(PlainFormat(tokenizer))
    known = {tuple(tokenizer.encode(*turns)) for turns in PROMPTS}
    assert {sample.token_ids[: sample.num_prompt_tokens] for sample in dataset} <= known


def test_turns_written_by_the_target_are_answered(
    collect_answers: Collect, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights write no turn that a user would, so that what they write is replaced."""
    turns = iter(f"what about the fox {number}?" for number in range(1000))
    monkeypatch.setattr(collect, "is_usable_turn", lambda text: True)
    monkeypatch.setattr(Tokenizer, "decode", lambda self, token_ids, skip_special_tokens=True: next(turns))
    finished = Collector._finish

    def ends_with_stop(self: Collector, job: Any, reason: FinishReason) -> None:
        finished(self, job, FinishReason.STOP)

    monkeypatch.setattr(Collector, "_finish", ends_with_stop)
    dataset = collect_answers(chat, (), self_prompt_share=1.0, max_turn_tokens=4)
    assert dataset.num_answer_tokens >= 400
    prompts = {sample.token_ids[: sample.num_prompt_tokens] for sample in dataset}
    assert prompts <= {chat.prompt(f"what about the fox {number}?") for number in range(1000)}
    assert len(prompts) > 10


def test_later_turns_follow_the_answers_of_the_target(
    collect_answers: Collect, chat: ChatFormat, tokenizer: Tokenizer
) -> None:
    turns = [("hello fox", "and the dog?")]
    dataset = collect_answers(chat, turns, temperatures=(0.0,), num_tokens=200, max_prompt_tokens=100)
    first = next(iter(dataset))
    assert first.token_ids[: first.num_prompt_tokens] == chat.prompt("hello fox")
    answer = tokenizer.decode(list(first.token_ids[first.num_prompt_tokens :])).strip()
    wanted = chat.prompt("hello fox", answer, "and the dog?")
    assert wanted in {sample.token_ids[: sample.num_prompt_tokens] for sample in dataset}


def test_collecting_without_prompts_needs_a_chat_template(collect_answers: Collect, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="has no chat template, so it cannot write prompts"):
        collect_answers(PlainFormat(tokenizer), ())


def test_prompts_that_are_all_too_long_are_an_error(collect_answers: Collect, chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"attempts in a row gave no usable answer.*prompts had more than 3 tokens"):
        collect_answers(chat, max_prompt_tokens=3)


def test_answers_longer_than_the_context_are_refused(collect_answers: Collect, chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"prompts of 60 tokens and answers of 90 do not fit .* context of 128"):
        collect_answers(chat, max_answer_tokens=90)


def test_a_failing_engine_gives_no_answer(
    collect_answers: Collect, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Engine) -> list[TokenOutput]:
        return [TokenOutput("0", finish_reason=FinishReason.ERROR, error=InternalError("out of memory"))]

    monkeypatch.setattr(Engine, "step", fail)
    with pytest.raises(InternalError, match="the target failed while it answered: out of memory"):
        collect_answers(chat)


def test_the_memory_of_the_engine_is_freed_afterwards(speaker: LoadedModel) -> None:
    settings = CollectSettings(num_tokens=1, max_answer_tokens=16, max_prompt_tokens=20, batch_size=2)
    with answering_engine(speaker, settings) as engine:
        assert engine.runner.cache.num_blocks == 1 + 2 * 3
    assert engine.runner.cache.keys == []

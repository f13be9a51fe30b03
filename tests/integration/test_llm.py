"""The engine alone, by the entry point ``from baton import LLM, SamplingParams``."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, PreTrainedModel

from baton import LLM, RequestOutput, SamplingParams
from baton.core.errors import ConfigError, InvalidRequestError
from baton.core.request import FinishReason
from tests.engine_runs import build_engine, build_runner, run, tokens_of
from tests.tiny_models import build_model
from tests.tiny_tokenizers import byte_level_tokenizer

PROMPTS = [[5, 17, 29, 101], [7], list(range(3, 60)), [200, 3, 3, 9, 14]]


def model() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return build_model(LlamaConfig(vocab_size=512, max_position_embeddings=256, num_key_value_heads=2, **sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    model().save_pretrained(path)
    byte_level_tokenizer()._hf.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", kv_blocks=64, chunk_tokens=32, max_num_seqs=3) as built:
        yield built


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_match_the_engine(llm: LLM, temperature: float) -> None:
    params = [SamplingParams(max_tokens=9, temperature=temperature, seed=seed) for seed in range(len(PROMPTS))]
    expected = tokens_of(run(build_engine(build_runner(model())), PROMPTS, params))
    assert tokens(llm.generate(PROMPTS, params)) == expected


def test_a_single_prompt_is_a_batch_of_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    assert tokens(llm.generate(PROMPTS[0], params)) == tokens(llm.generate(PROMPTS[:1], params))
    [output] = llm.generate("hello", params)
    assert list(output.prompt_token_ids) == llm.tokenizer.encode("hello")
    assert output.finish_reason is FinishReason.LENGTH
    assert output.logprobs is None


def test_a_conversation_uses_the_chat_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    [output] = llm.chat(messages, SamplingParams(max_tokens=2))
    assert list(output.prompt_token_ids) == llm.tokenizer.apply_chat_template(messages)
    assert len(llm.chat([messages, messages], SamplingParams(max_tokens=2))) == 2


def test_logprobs_and_cached_tokens_are_reported(llm: LLM) -> None:
    prompt = list(range(100, 150))
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
    [first], [second] = llm.generate(prompt, params), llm.generate(prompt, params)
    assert first.logprobs is not None
    assert len(first.logprobs) == len(first.token_ids) == 3
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], [2]], [SamplingParams()], "2 prompts but 1 sampling_params"),
        ([[1], []], None, "has no tokens"),
        ([[1], [10**6]], None, "token ids go from 0 to"),
        ([1] * 2000, None, "context length"),
    ],
)
def test_a_batch_with_one_invalid_request_is_refused_as_a_whole(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams] | None, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params)
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=2))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"weights": "int3"}, "native, int8, int4, fp8"),
        ({"kv_cache": "int3"}, "native, int8"),
        ({"kv_blocks": 0}, "kv_blocks must be an integer of at least 2, got 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be an integer of at least 1, got 1.5"),
        ({"chunk_tokens": None}, "chunk_tokens must be an integer"),
        ({"kv_blocks": 10.5}, "kv_blocks must be an integer"),
        ({"kv_blocks": 10**12}, "There is no memory for kv_blocks: 1000000000000"),
        ({"num_threads": 0}, "num_threads must be an integer of at least 1"),
        ({"num_threads": "2"}, "num_threads must be an integer"),
        ({"dtype": "fp16"}, "dtype must be one of auto, float32, bfloat16, float16, got 'fp16'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 2, got 0"),
        ({"max_model_len": "100"}, "max_model_len must be an integer"),
        ({"model": ""}, "model must be the name, id or path of a model"),
        ({"model": 5}, "model must be the name, id or path of a model"),
    ],
)
def test_a_wrong_argument_is_named_in_the_error(folder: str, setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": folder, **setting})


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"abc", [None], [[1.5, 2.0]], [["a", "b"]], [1, "a"], [True], {"a": 1}],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts must be a text, a list of token ids, or a list of these"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, [None]], ids=repr)
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling_params must be SamplingParams or a list of them"):
        llm.generate([[1]], params)


@pytest.mark.parametrize("messages", ["hi", None, ["hi"], [["hi"]], {"role": "user"}], ids=repr)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages must be a list of"):
        llm.chat(messages)


def test_token_ids_of_numpy_are_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    expected = tokens(llm.generate([[5, 6, 7]], params))
    assert tokens(llm.generate(np.array([5, 6, 7]), params)) == expected
    assert tokens(llm.generate([np.array([5, 6, 7])], params)) == expected
    assert tokens(llm.generate([list(np.array([5, 6, 7]))], params)) == expected


def test_calls_from_several_threads_wait_for_one_another(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    expected = tokens(llm.generate(PROMPTS, params))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tokens(llm.generate(PROMPTS, params)), range(4)))
    assert found == [expected] * 4


@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.ENOMEM, (ConfigError, "no memory for kv_blocks: 64")), (errno.ENOSPC, (OSError, "full"))],
)
def test_only_a_lack_of_memory_blames_the_size_of_the_cache(
    folder: str, monkeypatch: pytest.MonkeyPatch, code: int, expected: tuple[type[Exception], str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, "full")

    monkeypatch.setattr("baton.llm.ModelRunner", fail)
    with pytest.raises(expected[0], match=expected[1]):
        LLM(folder, dtype="float32", kv_blocks=64)


def test_a_closed_model_refuses_to_answer(folder: str) -> None:
    with LLM(folder, dtype="float32", kv_blocks=64) as llm:
        pass
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="This LLM is closed"):
            llm.generate([[1, 2, 3]])
        llm.close()


def test_importing_baton_imports_no_torch() -> None:
    code = "import sys, baton; baton.SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_attribute_raises_attribute_error() -> None:
    import baton

    with pytest.raises(AttributeError, match="LMM"):
        _ = baton.LMM

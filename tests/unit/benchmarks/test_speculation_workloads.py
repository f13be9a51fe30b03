"""Prompts of the benchmark, its own and those of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from benchmarks.speculation_workloads import (
    KINDS,
    WORKLOADS,
    Workload,
    check_names,
    load_workloads,
    parse_prompt_files,
)
from tests.tiny_tokenizers import byte_level_tokenizer


def test_every_workload_has_enough_distinct_prompts_for_its_largest_batch():
    loaded = load_workloads(WORKLOADS, {}, byte_level_tokenizer())
    assert [workload.name for workload in loaded] == list(WORKLOADS)
    for workload in loaded:
        assert len(set(workload.prompts)) == len(workload.prompts) >= 16
    by_name = {workload.name: workload for workload in loaded}
    assert min(map(len, by_name["summarise"].prompts)) > max(map(len, by_name["story"].prompts))


def test_every_kind_has_some_prompts():
    for kind in load_workloads(KINDS, {}, byte_level_tokenizer()):
        assert len(set(kind.prompts)) == len(kind.prompts) >= 4


def test_prompts_use_the_chat_template_if_there_is_one(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    chat, plain = byte_level_tokenizer(), byte_level_tokenizer(chat_template=None)
    (of_chat,) = load_workloads(["p"], {"p": file}, chat)[0].prompts
    (of_plain,) = load_workloads(["p"], {"p": file}, plain)[0].prompts
    assert chat.decode(of_chat, skip_special_tokens=False).endswith("hello<|im_end|>\n<|im_start|>assistant\n")
    assert plain.decode(of_plain) == "hello"


def test_batches_continue_after_the_last_and_wrap_around():
    workload = Workload("w", ((1,), (2,), (3,)))
    assert workload.take(0, 2) == [(1,), (2,)]
    assert workload.take(2, 3) == [(3,), (1,), (2,)]


def test_a_file_replaces_a_workload(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "id": 7}\n')
    assert parse_prompt_files([f"chat={file}"]) == {"chat": file}
    (workload,) = load_workloads(["chat"], {"chat": file}, byte_level_tokenizer())
    assert len(workload.prompts) == 2


@pytest.mark.parametrize("text", ["chat", "=file", "chat=", ""])
def test_forms_other_than_name_and_file_are_refused(text):
    with pytest.raises(ConfigError, match="NAME=FILE"):
        parse_prompt_files([text])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": 5}\n', "line 2"),
        ('{"text": "a"}\n', "line 1"),
        ("[1]\n", "line 1"),
        ("hello\n", "line 1 is not JSON"),
        ('{"prompt": " "}\n', "line 1"),
        ("\n", "no prompts"),
    ],
)
def test_an_invalid_file_is_refused_with_the_line(tmp_path, content, complaint):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        load_workloads(["bad"], {"bad": file}, byte_level_tokenizer())


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        load_workloads(["x"], {"x": Path("nowhere.jsonl")}, byte_level_tokenizer())


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"no workload 'sumarise'; expected one of: chat, summarise. Did you mean summarise"
    ):
        check_names("workload", ["chat", "sumarise"], ["chat", "summarise"])

"""Prompts from files and from templates, and the target's input for conversations of several turns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.engine.models.tokenizer import Tokenizer
from baton.train.prompt_templates import PromptTemplates
from baton.train.prompts import ChatFormat, PlainFormat, read_prompts


def test_prompts_of_a_file_have_one_or_several_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Who?"}\n\n{"prompt": ["Who?", "And when?"]}\n', encoding="utf-8")
    assert read_prompts([file]) == [("Who?",), ("Who?", "And when?")]


@pytest.mark.parametrize("prompt", ["[]", '["Who?", " "]', '["Who?", 3]', '""', "3", "null"])
def test_prompts_without_text_are_refused(tmp_path: Path, prompt: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "Who?"}}\n{{"prompt": {prompt}}}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2 has no text in prompt"):
        read_prompts([file])


def test_templates_give_prompts_of_every_kind() -> None:
    templates = PromptTemplates.load()
    assert {"code", "translation", "mathematics", "extraction", "several_turns"} <= templates.kinds.keys()
    prompts = templates.prompts(400, seed=0)
    assert prompts == templates.prompts(400, seed=0)
    assert prompts != templates.prompts(400, seed=1)
    assert len(set(prompts)) > 300
    texts = [turn for turns in prompts for turn in turns]
    assert not [text for text in texts if re.search(r"\{\w+\}", text)]
    assert any(len(turns) > 1 for turns in prompts)


def test_every_name_in_the_templates_has_values() -> None:
    templates = PromptTemplates.load()
    texts = [turn for kind in templates.kinds.values() for turns in kind for turn in turns]
    texts += [value for values in templates.values.values() for value in values]
    names = {name for text in texts for name in re.findall(r"\{(\w+)\}", text)}
    assert names - {"number"} <= templates.values.keys()
    assert templates.values.keys() <= names


def test_the_input_of_a_later_turn_has_the_whole_conversation(tokenizer: Tokenizer) -> None:
    turns = ("Who?", "Anna.", "When?")
    text = tokenizer.decode(list(ChatFormat.of(tokenizer).prompt(*turns)), skip_special_tokens=False)
    assert [text.index(turn) for turn in turns] == sorted(text.index(turn) for turn in turns)
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    assert text == tokenizer.render_chat(messages)
    assert tokenizer.decode(list(PlainFormat(tokenizer).prompt(*turns))) == "Who?\n\nAnna.\n\nWhen?"

"""Text to tokens and back, incrementally."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ConfigError, InvalidRequestError
from baton.engine.models.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()


def stream(tokenizer: Tokenizer, token_ids: list[int], **options: object) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)  # type: ignore[arg-type]
    return [detokenizer.push((token_id,)) for token_id in token_ids] + [detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40), st.booleans())
def test_streamed_text_equals_the_whole_for_any_tokens(token_ids: list[int], skip: bool) -> None:
    pieces = stream(BYTE_LEVEL, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=30))
def test_no_piece_contains_a_partial_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode("a" + text, add_special_tokens=False)
    pieces = stream(tokenizer, token_ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(token_ids)


def test_an_incomplete_character_is_held_back_until_it_is_complete() -> None:
    token_ids = [token for byte in "🙂".encode() for token in _token_of_byte(byte)]
    detokenizer = BYTE_LEVEL.detokenizer()
    assert [detokenizer.push((token,)) for token in token_ids] == ["", "", "", "🙂"]


def test_flush_emits_incomplete_characters() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.push(_token_of_byte(0xE2)) == ""
    assert detokenizer.flush() == "\ufffd"


def test_tokens_in_groups_equal_tokens_one_by_one() -> None:
    token_ids = BYTE_LEVEL.encode("Grüße 日本語 hello")
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.push(token_ids) + detokenizer.flush() == "".join(stream(BYTE_LEVEL, token_ids))


def test_sentencepiece_keeps_the_space_that_continues_a_prompt() -> None:
    prompt, output = SENTENCEPIECE.encode("hello"), SENTENCEPIECE.encode("world")
    assert "".join(stream(SENTENCEPIECE, output, prompt_token_ids=prompt)) == " world"
    assert "".join(stream(SENTENCEPIECE, output)) == "world"


def test_sentencepiece_keeps_the_space_after_a_hidden_special_token() -> None:
    hello, world = SENTENCEPIECE.encode("hello"), SENTENCEPIECE.encode("world")
    assert "".join(stream(SENTENCEPIECE, [*hello, SENTENCEPIECE.eos_token_id or 0, *world])) == "hello world"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
def test_endless_invalid_bytes_neither_accumulate_nor_slow_down(tokenizer: Tokenizer) -> None:
    token_id = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\x80")
    detokenizer = tokenizer.detokenizer()
    started = time.monotonic()
    text = "".join(detokenizer.push((token_id,)) for _ in range(3000)) + detokenizer.flush()
    assert text == "\ufffd" * 3000
    assert time.monotonic() - started < 5


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    eos = BYTE_LEVEL.eos_token_id
    assert eos is not None
    assert "".join(stream(BYTE_LEVEL, [eos])) == ""
    assert "".join(stream(BYTE_LEVEL, [eos], skip_special_tokens=False)) == "<|eos|>"


def test_added_tokens_that_are_not_special_are_shown() -> None:
    token_ids = BYTE_LEVEL.encode("hello<note>")
    assert "".join(stream(BYTE_LEVEL, token_ids)) == "hello<note>"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    unknown = BYTE_LEVEL.vocab_size + 7
    assert BYTE_LEVEL.token_text(unknown) == ""
    assert "".join(stream(BYTE_LEVEL, [unknown])) == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
def test_token_texts_join_to_the_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("hello world 日", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in token_ids).decode().strip() == "hello world 日"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate \(U\+D800\) at character 2"):
        BYTE_LEVEL.encode("ab\ud800")


def test_the_chat_template_renders_and_tokenizes_special_tokens() -> None:
    messages = [{"role": "user", "content": "hello"}]
    token_ids = BYTE_LEVEL.apply_chat_template(messages)
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert BYTE_LEVEL.decode(token_ids, skip_special_tokens=False) == expected
    assert BYTE_LEVEL.is_special(token_ids[0])


def test_final_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello wor"}]
    text = BYTE_LEVEL.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("hello wor")


def test_template_kwargs_reach_the_template_and_only_the_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert BYTE_LEVEL.render_chat(messages, template_kwargs={"shout": True}).endswith("LOUD")
    with pytest.raises(InvalidRequestError, match="'chat_template'"):
        BYTE_LEVEL.render_chat(messages, template_kwargs={"chat_template": "{{ 1 }}"})


def test_a_template_error_is_a_client_error() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}]
    with pytest.raises(InvalidRequestError, match="system must come first"):
        BYTE_LEVEL.render_chat(messages)


def test_a_missing_chat_template_is_named() -> None:
    assert not SENTENCEPIECE.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        SENTENCEPIECE.render_chat([{"role": "user", "content": "hi"}])


def test_importing_the_module_does_not_import_transformers() -> None:
    code = (
        "import sys, baton.engine.models.tokenizer; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _token_of_byte(byte: int) -> list[int]:
    return [next(token for token in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(token) == bytes([byte]))]


def test_token_bytes_are_cached_except_for_unknown_ids():
    tokenizer = byte_level_tokenizer()
    known, unknown = tokenizer.encode("fox")[0], tokenizer.vocab_size + 5
    assert tokenizer.token_bytes(known) == tokenizer.token_bytes(known) != b""
    assert tokenizer.token_bytes(unknown) == b""
    assert known in tokenizer._bytes
    assert unknown not in tokenizer._bytes


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{}"}, {"tokenizer.json": "["}])
def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path, files):
    for name, content in {"config.json": '{"model_type": "llama"}', **files}.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no usable tokenizer \(.+\)\. Expected tokenizer"):
        Tokenizer.load(tmp_path)


def test_equal_tokenizers_have_the_same_vocabulary_and_template() -> None:
    assert byte_level_tokenizer().equals(byte_level_tokenizer())
    assert not byte_level_tokenizer().equals(byte_level_tokenizer("{{ messages }}"))
    assert not byte_level_tokenizer().equals(sentencepiece_tokenizer())

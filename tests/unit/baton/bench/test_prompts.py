"""Prompts have the requested number of tokens and share the requested prefixes."""

import pytest

from baton.bench.endpoint import CHAT, COMPLETIONS
from baton.bench.lengths import LengthLimits, fixed, uniform
from baton.bench.prompts import (
    PromptWriter,
    Segment,
    calibrated_writer,
    sample_texts,
    single_token_words,
    writer_for_tokenizer,
)
from baton.bench.workload import FileWorkload, SyntheticWorkload, read_prompts
from baton.core.errors import ConfigError
from baton.engine.models.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level_tokenizer


def word_tokenizer(num_words: int = 300) -> Tokenizer:
    """A vocabulary in which ``num_words`` lower-case words are one token each, with and without a space."""
    from itertools import islice, product

    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["".join(letters) for letters in islice(product("bcdfg", "aeiou", "lmnrs", "aeiou"), num_words)]
    vocabulary = {"<unk>": 0, "<s>": 1}
    for word in words:
        vocabulary.setdefault(f"Ġ{word}", len(vocabulary))
        vocabulary.setdefault(word, len(vocabulary))
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    wrapped.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ bos_token }}"
    return Tokenizer(wrapped)


@pytest.mark.parametrize("tokens", [1, 7, 500])
def test_lengths_are_exact_when_words_are_tokens(tokens):
    tokenizer = word_tokenizer()
    writer = writer_for_tokenizer(tokenizer, COMPLETIONS, "salt", "here")
    assert writer.is_exact
    assert len(tokenizer.encode(writer.write([Segment("a", tokens)]))) == tokens


def test_the_chat_template_is_part_of_the_length():
    tokenizer = word_tokenizer()
    writer = writer_for_tokenizer(tokenizer, CHAT, "salt", "here")
    assert writer.overhead == 2
    text = writer.write([Segment("a", writer.text_tokens(40))])
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": text}])) == 40


def test_lengths_are_right_on_average_for_another_tokenizer():
    tokenizer = byte_level_tokenizer()
    assert len(single_token_words(tokenizer)) < 200
    writer = writer_for_tokenizer(tokenizer, COMPLETIONS, "salt", "here")
    assert not writer.is_exact
    assert len(tokenizer.encode(writer.write([Segment("a", 1000)]))) == pytest.approx(1000, rel=0.05)


def test_calibration_finds_overhead_and_tokens_per_word():
    words = ["one", "two", "three"]
    counts = [5 + 1.5 * len(text.split()) for text in sample_texts(words)]
    writer = calibrated_writer(words, [round(count) for count in counts], "salt", "here")
    assert writer.tokens_per_word == pytest.approx(1.5)
    assert writer.overhead == 5


def test_equal_keys_give_equal_text_and_shorter_ones_prefixes():
    writer = PromptWriter([f"w{number}" for number in range(1000)], 1.0, 0, "salt", "here")
    long, short = (writer.write([Segment("a", tokens)]).split() for tokens in (50, 20))
    assert long[:20] == short
    assert writer.write([Segment("b", 20)]).split() != short
    other = PromptWriter(writer.words, 1.0, 0, "pepper", "here")
    assert other.write([Segment("a", 20)]).split() != short


class TestSyntheticWorkload:
    def make(self, overhead=0, **options) -> SyntheticWorkload:
        writer = PromptWriter([f"w{number}" for number in range(1000)], 1.0, overhead, "salt", "here")
        return SyntheticWorkload(writer, uniform(20, 40), fixed(8), LengthLimits(), **options)

    def take(self, workload, count, stage=0):
        source = workload.requests(stage)
        return [next(source) for _ in range(count)]

    def test_equal_seeds_give_equal_loads(self):
        assert self.take(self.make(seed=3), 20) == self.take(self.make(seed=3), 20)
        assert self.take(self.make(seed=3), 20) != self.take(self.make(seed=4), 20)

    def test_no_two_prompts_start_alike(self):
        specs = self.take(self.make(), 50) + self.take(self.make(), 50, stage=1)
        assert len({tuple(spec.prompt.split()[:5]) for spec in specs}) == 100

    def test_a_chat_template_does_not_shorten_the_unique_part(self):
        specs = self.take(self.make(overhead=12), 50)
        assert all(len(spec.prompt.split()) + 12 == spec.input_tokens for spec in specs)
        assert len({spec.prompt for spec in specs}) == 50

    def test_a_template_longer_than_the_prompt_leaves_one_word(self):
        specs = self.take(self.make(overhead=100), 5)
        assert all(len(spec.prompt.split()) == 1 for spec in specs)


def test_prompts_of_a_file_are_used_in_turn(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n')
    source = FileWorkload(read_prompts(file), fixed(4), LengthLimits(), 0, "f").requests(0)
    assert [next(source).prompt for _ in range(3)] == ["one", "two", "one"]


def test_another_stage_starts_with_other_prompts_of_a_file():
    workload = FileWorkload([f"prompt {number}" for number in range(100)], fixed(4), LengthLimits(), 0, "f")
    stages = [[next(source).prompt for _ in range(10)] for source in map(workload.requests, range(5))]
    assert len({prompt for prompts in stages for prompt in prompts}) == 50


@pytest.mark.parametrize("text", ["", "{}", '{"prompt": 3}', '{"prompt": ""}', "nonsense"])
def test_a_file_without_prompts_is_refused(tmp_path, text):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--prompts"):
        read_prompts(file)

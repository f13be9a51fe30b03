"""Small real tokenizers that are trained at run time, without network and files."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from baton.engine.models.tokenizer import Tokenizer

CORPUS = ["hello world, the quick brown fox jumps over the lazy dog. 日本語 €uro 🙂 Grüße stop END"] * 20

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout %}LOUD{% endif %}{% endif %}"
)


def byte_level_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3, Qwen and SmolLM."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|eos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<note>", normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    wrapped.chat_template = chat_template
    return Tokenizer(wrapped)


def sentencepiece_tokenizer() -> Tokenizer:
    """A tokenizer with word-start marks and byte fallback, as in Llama 2, Mistral and Gemma."""
    words = ["▁hello", "▁world", "▁", "h", "lo", "▁the", "日"]
    vocab = [("<unk>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    vocab += [(word, -float(position + 1)) for position, word in enumerate(words)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"))


def write_model_folder(folder: Path) -> Path:
    """Writes the files of a model that the control plane reads."""
    byte_level_tokenizer().save(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder

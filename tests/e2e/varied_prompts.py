"""Fifty prompts that differ in length, language, script and kind."""

from __future__ import annotations

_SHORT = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time",
    "1, 2, 3, 4,",
    "SELECT name FROM users WHERE",
    "Q: What is 17 + 25?\nA:",
    "La réponse à la question est",
    "Die Hauptstadt von Österreich heißt",
    "東京は日本の",
    "Привет, меня зовут",
    "🙂🙂🙂",
    "<html><body><h1>",
    '{"name": "Ada", "born":',
    "A",
    "\n\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Roses are red, violets are blue,",
    "import numpy as np\n\n\ndef softmax(x):\n    ",
    "Dear Sir or Madam,",
    "E = mc^2 means that",
    "To be, or not to be, that is the",
    "Ingredients:\n- 200 g flour\n- 3 eggs\n-",
    "Translate to Spanish: Good morning ->",
    "In 1969, the first humans",
    "x = 5; y = 7; print(x * y) prints",
)
_FACTS = (
    "The mitochondrion turns nutrients into energy.",
    "Rivers carry sediment to the sea, where it settles in layers.",
    "A compiler turns source text into instructions for a machine.",
    "Bread rises because yeast makes gas.",
    "Light takes eight minutes from the sun to the earth.",
    "Ledgers have been kept on clay, on paper and on disks.",
    "A sonnet has fourteen lines, and a haiku three.",
)


def _passage(seed: int, num_sentences: int) -> str:
    return " ".join(_FACTS[(seed * 3 + index * (seed % 5 + 1)) % len(_FACTS)] for index in range(num_sentences))


def varied_prompts() -> list[str]:
    """The fifty prompts, from one token to about six hundred, equal in every call."""
    shared = _passage(2, 6)
    questions = [
        f"{shared}\nQuestion {index}: which of these is about number {index * 7}?\nAnswer:" for index in range(8)
    ]
    summaries = [f"{_passage(index, 2 + index)}\nIn one sentence:" for index in range(12)]
    long_ones = [f"{index}. {_passage(index, 30 + 5 * index)}\nIn short:" for index in range(5)]
    prompts = [*_SHORT, *questions, *summaries, *long_ones]
    if len(prompts) != 50 or len(set(prompts)) != 50:
        raise AssertionError(f"{len(prompts)} prompts, {len(set(prompts))} of them different")
    return prompts

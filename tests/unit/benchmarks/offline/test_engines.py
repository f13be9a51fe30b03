"""The engines of the offline benchmark give what they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.offline import baton_engine, transformers_continuous_engine, transformers_engine
from tests.tiny_models import random_prompts, tiny_model


@pytest.mark.parametrize("name", ["native", "int8", "transformers", "transformers-continuous"])
def test_every_prompt_gets_the_exact_number_of_tokens(name: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    if name == "transformers":
        generate = transformers_engine.load(str(tmp_path), "float32")
    elif name == "transformers-continuous":
        generate = transformers_continuous_engine.load(str(tmp_path), "float32", max_model_len=32, max_sequences=4)
    else:
        generate = baton_engine.load(tmp_path, "float32", max_model_len=32, max_sequences=4, weights=name)
    for max_tokens in (1, 9):
        assert generate(random_prompts([12, 12, 12]), max_tokens) == [max_tokens] * 3

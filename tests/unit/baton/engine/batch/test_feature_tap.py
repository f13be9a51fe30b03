"""The feature tap reads the hidden states that transformers reports, in the engine too."""

from __future__ import annotations

import pytest
import torch

from baton.core.drafts import ScheduledSequence
from baton.core.errors import UnsupportedModelError
from baton.core.request import Request, SamplingParams
from baton.engine.batch.hidden_states import FINAL_HIDDEN, FeatureTap
from baton.engine.kv_cache.block_manager import BlockManager
from tests.engine_runs import BLOCK_SIZE, build_runner
from tests.tiny_models import tiny_model

PROMPT = [5, 9, 13, 21, 34, 55, 8, 3, 2]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox", "olmo2", "mixtral"])
def test_features_match_the_hidden_states_of_transformers(name: str) -> None:
    model = tiny_model(name)
    with torch.inference_mode():
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    runner = build_runner(model, decoder="transformers")
    layers = (FINAL_HIDDEN, 0, 1)
    tap = FeatureTap(model, layers)
    blocks = BlockManager(64, BLOCK_SIZE)
    request = Request("a", PROMPT, SamplingParams())
    blocks.grow(request, len(PROMPT))
    taken = []
    for chunk in (4, 3, 2):
        runner.forward(runner.build_batch([ScheduledSequence(request, chunk)]))
        request.num_computed_tokens += chunk
        taken.append(tap.take())
    expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
    torch.testing.assert_close(torch.cat(taken), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="no forward"):
        tap.take()
    tap.close()


def test_the_output_of_the_last_layer_is_not_normalized() -> None:
    model = tiny_model("llama")
    runner = build_runner(model, decoder="transformers")
    tap = FeatureTap(model, (2, FINAL_HIDDEN))
    request = Request("a", PROMPT, SamplingParams())
    BlockManager(64, BLOCK_SIZE).grow(request, len(PROMPT))
    runner.forward(runner.build_batch([ScheduledSequence(request, len(PROMPT))]))
    raw, final = tap.take().chunk(2, dim=-1)
    with torch.inference_mode():
        torch.testing.assert_close(model.get_decoder().norm(raw), final)
    assert not torch.allclose(raw, final)


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="has 2 layers"):
        FeatureTap(tiny_model("llama"), [7])

"""The facts that config.json gives before a model is loaded."""

from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from baton.engine.models.model_config import check_context_length, read_model_config, stated_context_length


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024, "seq_length": 512}, 1024),
        ({"max_position_embeddings": 77, "text_config": {"seq_length": 4096}}, 4096),
        ({"max_position_embeddings": "long"}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": 77, "decoder": {"max_position_embeddings": 4096}}, None),
        ({}, None),
    ],
)
def test_the_context_length_is_that_of_the_language_model(config, length):
    assert stated_context_length(config) == length


@pytest.mark.parametrize("content", [None, b"{", b"[1]", b"\xff"])
def test_an_unreadable_config_has_no_context_length(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert read_model_config(tmp_path) == {}


@pytest.mark.parametrize(("asked", "own"), [(None, 2048), (2048, 2048), (4096, None)])
def test_context_lengths_that_fit_or_are_unknown_pass(asked, own):
    check_context_length(asked, own)


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"max_model_len is 2049, but the model's context length is 2048\. Lower it"):
        check_context_length(2049, 2048)

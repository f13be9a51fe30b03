"""A model or a draft that cannot run is refused when the cluster starts, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MambaConfig, MambaForCausalLM

from baton.core.errors import UnsupportedModelError
from cluster.config.config import BatonConfig
from tests.e2e.conftest import start
from tests.tiny_drafts import tiny_eagle3
from tests.tiny_tokenizers import byte_level_tokenizer


@pytest.mark.thorough(
    covered_by="tests/integration/test_engine_architectures.py::test_an_unsupported_architecture_is_refused_with_the_reason[mamba]"
)
def test_a_model_without_a_kv_cache_is_refused_at_start(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2)).save_pretrained(tmp_path)
    byte_level_tokenizer()._hf.save_pretrained(tmp_path)
    config = BatonConfig.from_dict({"model": str(tmp_path), "router": {"port": 0}})
    with pytest.raises(UnsupportedModelError, match="Mamba"):
        start(config)


@pytest.mark.thorough(
    covered_by="tests/unit/cluster/cli/test_cli.py::test_a_draft_that_does_not_fit_is_an_error_before_anything_starts"
)
def test_a_draft_of_another_model_is_refused_at_start(tmp_path: Path) -> None:
    draft = tiny_eagle3().write(tmp_path / "draft")
    config = BatonConfig.from_dict({"router": {"port": 0}, "speculation": {"draft": str(draft)}})
    with pytest.raises(UnsupportedModelError, match="vocabulary of 96 tokens"):
        start(config)

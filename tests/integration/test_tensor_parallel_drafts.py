"""Drafts and caches of a divided model. One model of a process can be divided, so each test starts its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drafting import engine_over, requests_for
from tests.drafting import run as run_requests
from tests.integration.test_tensor_parallel_serving import TEXTS, speculating
from tests.medusa_copies import write_copies_of_the_lm_head
from tests.ranked_models import Build, build_with_draft, divisible_model, many_ways, ranked, save
from tests.tiny_drafts import tiny_draft_lm, tiny_eagle, tiny_eagle3, tiny_target
from tests.tiny_tokenizers import byte_level_tokenizer


def test_an_int8_cache_is_divided_too(tmp_path: Path) -> None:
    build = Build(save(divisible_model("llama"), tmp_path / "llama"), kv_cache="int8")
    expected = many_ways(build_with_draft(build, None)[0])
    with ranked(build, 2) as (runner, _, _):
        assert many_ways(runner) == expected


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    save(tiny_target(), folder)
    byte_level_tokenizer().save(folder)
    return folder


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "draft_model"])
def test_methods_with_a_network(target: Path, tmp_path: Path, method: str) -> None:
    draft = tmp_path / "draft"
    if method == "medusa":
        draft.mkdir()
        write_copies_of_the_lm_head(tiny_target(), draft, num_heads=3)
    elif method == "draft_model":
        save(tiny_draft_lm(), draft)
        byte_level_tokenizer().save(draft)
    else:
        (tiny_eagle(embedding=False) if method == "eagle" else tiny_eagle3()).write(draft)
    build = Build(str(target), str(draft))
    plain = build_with_draft(Build(str(target)), None)[0]
    expected = run_requests(engine_over(plain), requests_for(TEXTS))
    with ranked(build, 2) as (runner, loaded, _):
        assert speculating(runner, loaded, method) == expected
        drafted = runner.spec.draft_layers
    assert bool(drafted) == (method != "medusa")

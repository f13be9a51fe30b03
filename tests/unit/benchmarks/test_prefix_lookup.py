"""What the benchmark measures is what it says."""

from __future__ import annotations

from benchmarks.prefix_lookup import Setting, fill_index, measure_router, measure_worker

SETTING = Setting(num_workers=5, prompt_tokens=101, block_size=4, blocks_per_worker=64, repeats=2)
PROMPT = tuple(range(101))


def test_caches_are_full_and_hold_parts_of_the_prompt() -> None:
    index = fill_index(SETTING, PROMPT)
    assert index.sizes() == {f"worker-{number}": 64 for number in range(5)}
    cached = index.cached_tokens(index.sizes(), PROMPT)
    assert cached.pop("worker-0") == 100
    assert len(set(cached.values())) > 1


def test_every_figure_is_there() -> None:
    assert all(value > 0 for value in measure_router(SETTING).values())
    assert measure_worker(SETTING, 0) > 0
    assert measure_worker(SETTING, 1) > 0

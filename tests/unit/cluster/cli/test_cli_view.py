"""``baton status`` shows every figure on narrow and wide screens."""

import io
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from cluster.cli.cli_view import in_words, render_status
from cluster.telemetry.slo_metrics import SloMetrics
from tests.unit.cluster.fake_router import FakeRouter, running


@pytest.fixture
def router():
    with running() as fake:
        yield fake


@pytest.fixture
def shown(router) -> Callable[[int], list[str]]:
    def show(width: int) -> list[str]:
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(render_status(router.status(), "http://here:1", width))
        return console.export_text().splitlines()

    return show


def test_the_view_shows_pools_workers_blocks_and_requests(shown):
    lines = shown(160)
    assert lines[0] == "fake [model] at http://here:1, up for 1 h 2 min"
    assert lines[1] == "requests: 1 in flight, 20 finished, 4 cancelled, 3 rejected, 2 failed"
    rows = [line.split() for line in lines]
    assert ["prefill", "1", "of", "1"] in rows
    assert ["decode-1", "ready", "3", "2/64", "1", "100", "7", "5", "cpu", "59", "s", "here", "4242"] in rows


def test_nothing_is_truncated_on_80_columns(router: FakeRouter, shown):
    router.states = "draining"
    lines = shown(80)
    assert not [line for line in lines if "…" in line or len(line.rstrip()) > 80]
    assert ["prefill-1", "draining", "3", "2/64", "1", "100", "7", "5", "cpu"] in [line.split() for line in lines]


def test_slo_attainment_is_shown_below_the_workers(router: FakeRouter):
    status = {**router.status(), "slo": SloMetrics(CollectorRegistry()).status()}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 80))
    lines = console.export_text().splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert rows.index("interactive 1 s 50 ms 95 - - - - - -") > [row[:8] for row in rows].index("decode-1")
    assert not [line for line in lines if "…" in line or len(line.rstrip()) > 80]


def test_the_view_shows_why_a_worker_is_not_ready(router: FakeRouter, shown):
    router.reason = "Ray has no [GPU]."
    assert "prefill-1: Ray has no [GPU]." in shown(80)


def test_the_view_shows_how_long_a_worker_has_waited_for_a_node(router: FakeRouter):
    status = router.status()
    status["pools"]["decode"]["workers"][0] |= {"is_pending": True, "uptime_s": 200.0, "reason": "no GPU is free"}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 80))
    assert "decode-1 has waited for a node for 3 min 20 s: no GPU is free" in console.export_text()


def test_the_view_shows_which_workers_an_upgrade_has_yet_to_replace(router: FakeRouter):
    status = router.status()
    status["pools"]["decode"]["outdated"] = ["decode-1"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 80))
    assert "decode: being upgraded; with old settings: decode-1" in console.export_text()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.9, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min"), (100_000, "1 d 3 h")],
)
def test_durations_are_readable(seconds, words):
    assert in_words(seconds) == words


def test_workers_with_equal_memory_budgets_share_a_line(router: FakeRouter):
    status = router.status()
    gib = 2**30
    budget = {"total": 80 * gib, "utilization": 0.9, "share": 0.5, "weights": 16 * gib, "kv": gib, "kv_blocks": 512}
    for pool in status["pools"].values():
        for worker in pool["workers"]:
            worker["memory"] = budget
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 80))
    shown = " ".join(console.export_text().split())
    assert "GPU memory of prefill-1, decode-1" in shown
    assert "total 80.00 GiB x utilization 0.9 x share 0.5 = 36.00 GiB: weights 16.00 GiB" in shown
    assert "KV 1.00 GiB (512 blocks)" in shown


def test_missing_cuda_graphs_are_a_note(router: FakeRouter):
    status = router.status()
    status["pools"]["decode"]["workers"][0]["graph_failure"] = "CUDA graphs are off: bucket 8x4 could not be recorded"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 80))
    assert "decode-1: CUDA graphs are off: bucket 8x4 could not be recorded" in " ".join(console.export_text().split())


def test_memory_of_cpu_workers_is_not_shown(router: FakeRouter):
    status = router.status()
    status["pools"]["decode"]["workers"][0]["memory"] = {"weights": 1, "kv": 1, "kv_blocks": 7, "total": 0}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 80))
    assert "memory" not in console.export_text()


def test_several_routers_are_named(router: FakeRouter):
    counts = {"in_flight": 1, "finished": 2, "cancelled": 0, "rejected": 0, "failed": 0}
    routers = [{"index": index, "requests": {**counts, "in_flight": index}} for index in (0, 1)]
    status = {**router.status(), "router": 1, "routers": routers}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 100))
    assert "router 0: 0 in flight, router 1: 1 in flight; attainment is that of router 1" in console.export_text()
    routers[0]["requests"] = None
    console.print(render_status(status, "http://here:1", 100))
    text = " ".join(console.export_text().split())
    assert "router 0 does not answer, so its requests are not counted, router 1: 1 in flight" in text


@pytest.mark.parametrize(
    ("jobs", "line"),
    [
        (None, None),
        ({"states": {"in_progress": 0}, "lines": {"open": 0, "completed": 0, "failed": 0}}, None),
        (
            {"states": {"in_progress": 1}, "lines": {"open": 800, "completed": 1197, "failed": 3}},
            "jobs: 1 in progress; 1197 of 2000 lines answered, 3 failed",
        ),
        (
            {"states": {"in_progress": 1, "completed": 4}, "lines": {"open": 2, "completed": 0, "failed": 0}},
            "jobs: 1 in progress; 0 of 2 lines answered, 0 failed; kept, of earlier clusters too: 4 completed",
        ),
        (
            {"states": {"completed": 3, "failed": 7}, "lines": {"open": 0, "completed": 0, "failed": 0}},
            "jobs: kept, of earlier clusters too: 3 completed, 7 failed",
        ),
    ],
)
def test_jobs_are_one_line(router: FakeRouter, jobs: object, line: str | None):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_status({**router.status(), "jobs": jobs}, "http://here:1", 120))
    found = [text.rstrip() for text in console.export_text().splitlines() if text.startswith("jobs:")]
    assert found == ([] if line is None else [line])


def test_the_state_of_speculation_is_shown_for_each_worker(router: FakeRouter):
    status = router.status()
    entry = {"method": "eagle3", "mode": "used", "num_drafts": 9, "alpha": 0.62, "cost": None, "length": 2.1}
    unused = {**entry, "method": "ngram", "num_drafts": 0}
    shadow = {**entry, "method": "suffix", "mode": "shadow", "cost": 0.05}
    report = {"method": "auto", "draft_share": 0.07, "tokens_per_sequence": 1.25, "methods": [entry, unused, shadow]}
    status["pools"]["decode"]["workers"][0]["speculation"] = report
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_status(status, "http://here:1", 160))
    assert (
        "drafts of decode-1: eagle3 α 0.62, c -, k 2.1; suffix (shadow) α 0.62, c 0.05, k 2.1 (auto drafts 1.2 a step)"
        in console.export_text()
    )

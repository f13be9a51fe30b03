"""The demo shows every request, shuts the cluster down whatever happens, and fails when a request failed."""

import io
import signal

import pytest
import typer
from rich.console import Console

from baton.core.errors import BatonError
from cluster.cli import demo
from cluster.cli.demo_report import Measurement, cost_table
from cluster.config.config import BatonConfig
from tests.unit.cluster.command_line import ROOT
from tests.unit.cluster.fake_router import FakeRouter, running


class FakeCluster:
    def __init__(self, router: FakeRouter) -> None:
        self.endpoint = router.endpoint
        self.stopped = False

    def reload(self, config: object) -> None:
        raise NotImplementedError

    def wait(self, stop: object, on_pass: object = None) -> None:
        raise AssertionError("the demo does not wait")

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with running() as router:
        fake = FakeCluster(router)
        monkeypatch.setattr(demo, "start_cluster", lambda config, report: fake)
        yield fake


def test_the_table_has_a_row_for_each_request_and_totals(cluster, capsys):
    demo.demo()
    out = capsys.readouterr().out
    assert "echo Explain in three sentences" in out
    rows = [line.split() for line in out.splitlines()]
    requests = [row for row in rows if row[:1] in (["stream"], ["batch"]) and row[-2:] == ["1.0", "-"]]
    assert len(requests) == 9
    (total,) = [row for row in rows if row[:1] == ["sum"]]
    assert total == ["sum", "99", "36", "27", "0", "8.6"]
    assert cluster.stopped
    assert "the cluster has shut down" in out


def test_a_failed_request_fails_the_demo(cluster, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_BATCH_PROMPTS", ("fine", "FAIL"))
    with pytest.raises(typer.Exit) as caught:
        demo.demo()
    out = capsys.readouterr().out
    assert caught.value.exit_code == 1
    assert "failed: The prompt is [too] long." in out
    assert "1 requests failed" in out
    assert cluster.stopped


def test_a_router_that_does_not_answer_fails_the_demo_and_stops_the_cluster(cluster, capsys):
    cluster.endpoint = "http://127.0.0.1:9"
    with pytest.raises(typer.Exit):
        demo.demo()
    assert cluster.stopped
    assert "No answer from" in capsys.readouterr().out


def test_a_cluster_that_does_not_start_is_explained(cluster, capsys, monkeypatch):
    def refuse(config, report):
        raise BatonError("no [GPU] anywhere")

    monkeypatch.setattr(demo, "start_cluster", refuse)
    with pytest.raises(typer.Exit):
        demo.demo()
    assert "error: no [GPU] anywhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "local_prefill"),
    [
        (None, "never"),
        ("routing: {picker: random}", "never"),
        ("routing: {local_prefill: auto}", "auto"),
        ("routing: {local_prefill: always}", "always"),
    ],
)
def test_prompts_are_handed_off_unless_the_configuration_differs(cluster, monkeypatch, tmp_path, text, local_prefill):
    started: list[BatonConfig] = []
    monkeypatch.setattr(demo, "start_cluster", lambda config, report: started.append(config) or cluster)
    file = tmp_path / "demo.yaml"
    file.write_text(text or "")
    demo.demo(file if text else None)
    (config,) = started
    assert config.routing.local_prefill == local_prefill
    assert config.router.port == 0
    assert config.routing.picker == ("random" if text and "random" in text else "best_score")


def test_make_demo_shows_the_handoff(cluster, monkeypatch):
    """As the Makefile calls it: a file that spells every key out would leave local prefill on."""
    recipe = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "cluster.cli.demo" in line)
    words = recipe.replace("$(ARGS)", "").split()
    started: list[BatonConfig] = []
    monkeypatch.setattr(demo, "start_cluster", lambda config, report: started.append(config) or cluster)
    monkeypatch.setattr("sys.argv", words[words.index("cluster.cli.demo") :])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert not caught.value.code
    assert started[0].routing.local_prefill == "never"


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_shows_large_figures_whole(width):
    one = Measurement("batch 12", 16384, 16368, 10240, 9999, 12345.6, 1234.5, 99999.0, 34567.8, 45678.9, 12345 << 20)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(cost_table([one, one], width))
    lines = console.export_text().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    (first, second) = [line.split() for line in lines if line.startswith("batch")]
    figures = ["16384", "16368", "10240", "9999", "12346", "1234", "102", "34568", "12345", "45679"]
    assert first == second == ["batch", "12", *figures]
    assert next(line.split() for line in lines if line.startswith("mean")) == ["mean", *figures]


def test_unknown_values_are_shown_as_a_dash():
    one = Measurement("one", 3, 0, 1, 0, 5.04, None, 10.0, None, None, None)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(cost_table([one], 80))
    row = next(line.split() for line in console.export_text().splitlines() if line.startswith("one"))
    assert row == ["one", "3", "0", "1", "0", "5.0", "-", "100", "-", "-", "-"]


def test_ctrl_c_shuts_the_cluster_down_without_a_traceback(cluster, capsys, monkeypatch):
    def interrupt(*arguments):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "cost_table", interrupt)
    with pytest.raises(typer.Exit) as caught:
        demo.demo()
    assert caught.value.exit_code == 130
    assert cluster.stopped
    assert capsys.readouterr().out.endswith("• stopped\n")


def test_on_a_terminal_a_progress_bar_replaces_the_one_before():
    written = io.StringIO()
    lines = demo._Lines(Console(file=written, force_terminal=True, width=80))
    for line in ("loading", "compiling [#.] 50 %", "compiling [##] 100 %", "ready"):
        lines(line)
    assert written.getvalue().count("\x1b[1A\x1b[2K") == 1

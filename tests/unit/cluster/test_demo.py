"""The demo shows every request, shuts the cluster down whatever happens, and fails when a request failed."""

import pytest
import typer

from cluster import demo
from engine.errors import BatonError
from tests.unit.cluster.fake_router import FakeRouter, running


class FakeCluster:
    def __init__(self, router: FakeRouter) -> None:
        self.endpoint = router.endpoint
        self.stopped = False

    def wait(self, stop: object) -> None:
        raise AssertionError("the demo does not wait")

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(demo, "resolve_model", lambda reference, report: None)
    with running() as router:
        fake = FakeCluster(router)
        monkeypatch.setattr(demo, "start_cluster", lambda config, report: fake)
        yield fake


def test_a_table_with_a_row_for_each_request_and_totals(cluster, capsys):
    demo.demo()
    out = capsys.readouterr().out
    assert "echo Explain in three sentences" in out
    rows = [line for line in out.splitlines() if "1,000,000" in line]
    assert len(rows) == 9
    (total,) = [line for line in out.splitlines() if "9,000,000" in line]
    assert [cell.strip() for cell in total.split("│")][1:5] == ["total", "99", "36", "27"]
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


def test_a_router_that_answers_nothing_fails_the_demo_and_stops_the_cluster(cluster, capsys):
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

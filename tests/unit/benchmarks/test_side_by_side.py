"""Two servers by turns: the reference server, which runs no model, against a slower one of its kind."""

from __future__ import annotations

import argparse
import io
import shlex
import socket
import sys
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from baton.core.errors import ConfigError
from benchmarks.side_by_side import FIGURES, Load, Server, main, median_interval, prompts, render, run_turns, running

LOAD = Load("two", 2, 40, 4, 4)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reference(name: str, tpot_ms: int) -> Server:
    port = free_port()
    python = shlex.quote(sys.executable)
    command = f"{python} -m tests.reference_server --port {port} --ttft-ms 10 --tpot-ms {tpot_ms}"
    return Server(name, command, f"http://127.0.0.1:{port}/v1")


def test_servers_are_measured_in_turn_and_stopped(tmp_path: Path) -> None:
    fast, slow = reference("fast", 5), reference("slow", 50)
    tell = Console(file=io.StringIO())
    results = run_turns([fast, slow], [LOAD], 1, tmp_path / "log", tell)
    [one], [other] = (results["two"][name] for name in ("fast", "slow"))
    assert set(one) == set(FIGURES)
    assert one["failed"] == other["failed"] == 0
    assert one["TPOT p50 ms"] < other["TPOT p50 ms"]
    assert one["output tokens/s"] > other["output tokens/s"]
    for server in (fast, slow):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/models")
    tell.print(render(results))


def test_together_both_servers_run_from_the_first_turn_to_the_last(tmp_path: Path) -> None:
    one, other = reference("one", 1), reference("other", 1)
    output = io.StringIO()
    results = run_turns([one, other], [LOAD], 2, tmp_path / "log", Console(file=output, width=200), together=True)
    assert {name: len(turns) for name, turns in results["two"].items()} == {"one": 2, "other": 2}
    lines = output.getvalue().splitlines()
    assert [line.split(", ")[1] for line in lines] == ["one", "other", "other", "one"]
    for server in (one, other):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/models")


@pytest.mark.parametrize(("count", "ranks"), [(5, None), (6, (1, 6)), (10, (2, 9)), (20, (6, 15))])
def test_the_interval_of_a_median_comes_from_the_sign_test(count: int, ranks: tuple[int, int] | None) -> None:
    assert median_interval([float(rank) for rank in range(count, 0, -1)]) == ranks


def test_both_servers_get_the_same_prompts_and_each_round_new_ones() -> None:
    assert prompts(LOAD, 0) == prompts(LOAD, 0)
    assert not set(prompts(LOAD, 0)) & set(prompts(LOAD, 1))
    assert len(set(prompts(LOAD, 0))) == LOAD.num_requests + LOAD.concurrency


def test_ratios_compare_the_first_to_the_last_within_a_round() -> None:
    turns = {"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 4.0]}
    figures = {name: [dict.fromkeys(FIGURES, value) for value in values] for name, values in turns.items()}
    output = io.StringIO()
    Console(file=output, width=200).print(render({"load": figures}))
    assert output.getvalue().count("2.00x") == len(FIGURES)


def test_a_server_that_exits_at_once_is_reported(tmp_path: Path) -> None:
    server = Server("broken", "false", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="broken ended with status 1"), running(server, tmp_path / "log"):
        pass


@pytest.mark.parametrize("text", ["baton", "baton=up", "a=ftp://x=run", "=http://x=run"])
def test_an_invalid_server_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=URL=COMMAND"):
        Server.parse(text)


def test_a_missing_library_is_reported_before_any_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "baton.bench.client", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setattr("benchmarks.side_by_side.run_turns", lambda *_: pytest.fail("servers were started"))
    monkeypatch.setattr(sys, "argv", ["side_by_side", *("one=http://127.0.0.1:9/v1=true",) * 2])
    with pytest.raises(SystemExit):
        main()
    assert "aiohttp is not installed. Install it with" in capsys.readouterr().err

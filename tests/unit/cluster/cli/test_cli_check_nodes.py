"""`baton check --nodes`: the exit status."""

from __future__ import annotations

import pytest
import typer

from cluster.cli.cli_check_nodes import check_all_nodes
from cluster.config.config import BatonConfig
from cluster.controller import node_checks
from cluster.controller.node_checks import NodeReport
from cluster.nodes import ray_connection


def test_a_cluster_in_which_no_worker_fits_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_connection, "connect", lambda *_: None)
    monkeypatch.setattr(node_checks, "check_nodes", lambda *_, **__: NodeReport([]))
    with pytest.raises(typer.Exit) as ended:
        check_all_nodes(BatonConfig(), as_json=False)
    assert ended.value.exit_code == 1
    assert "No node has the resources that the pools request" in capsys.readouterr().out

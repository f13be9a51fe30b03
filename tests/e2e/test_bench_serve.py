"""The load tool against a real cluster: the cluster serves what the tool requests, and the report matches."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.cli.cli import run
from tests.e2e.conftest import EXACT
from tests.running_cluster import MODEL, RunningCluster

SETTINGS = EXACT


def test_lengths_are_exact_and_no_request_fails(cluster: RunningCluster, tmp_path: Path) -> None:
    before = cluster.metric("baton_kv_transfers_total")
    for kind in ("--completion", "--chat"):
        file = tmp_path / f"report{kind}.json"
        arguments = (
            "bench", "serve", "--url", f"{cluster.endpoint}/v1", kind, "--concurrency", "3",
            "--requests", "9", "--input", "uniform:60-120", "--output", "uniform:4-12", "--json", file, "--samples",
        )  # fmt: skip
        assert run([str(argument) for argument in arguments]) == 0
        document = json.loads(file.read_text())
        assert document["target"]["model"] == MODEL
        assert document["target"]["counting"]["tokens_per_word"] == 1.0
        (stage,) = document["stages"]
        assert stage["num_failed"] == 0
        assert stage["tokens"]["cached_share"] < 0.5  # the chat template at most
        assert len(stage["samples"]) >= 12
        for sample in stage["samples"]:
            assert sample["input_tokens"] == sample["wanted_input"]
            assert sample["output_tokens"] == sample["wanted_output"]
            assert 0 < sample["num_chunks"] <= sample["output_tokens"]
            assert sample["intended_s"] <= sample["sent_s"] < sample["first_token_s"] <= sample["last_token_s"]
    cluster.assert_nothing_leaked()
    assert cluster.metric("baton_kv_transfers_total") >= before + 24


def test_shared_prefixes_are_found_in_the_cache(cluster: RunningCluster, tmp_path: Path) -> None:
    file, trace = tmp_path / "prefix.json", tmp_path / "trace.jsonl"
    # Blocks of 512 tokens, scaled to 32: three of four are the same in every prompt.
    lines = [{"timestamp": n, "input_length": 2048, "output_length": 4, "hash_ids": [0, 1, 2, 3 + n]} for n in range(8)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = (
        "bench", "serve", "--url", f"{cluster.endpoint}/v1", "--requests", "6", "--trace", trace,
        "--input-scale", "0.0625", "--json", file,
    )  # fmt: skip
    assert run([str(argument) for argument in arguments]) == 0
    (stage,) = json.loads(file.read_text())["stages"]
    assert stage["tokens"]["cached_share"] == 96 / 128

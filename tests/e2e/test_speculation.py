"""Speculation in a live cluster: on by default with the bundled head, and set by each request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.conftest import EXACT
from tests.running_cluster import MODEL, RunningCluster

SETTINGS = EXACT
QUESTION = "Write a list of ten animals, one on each line, and then write the same list again."


def ask(cluster: RunningCluster, method: str | None, **parameters: Any) -> Any:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 48,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **parameters,
    }
    if method is not None:
        body["speculation"] = {"method": method}
    return cluster.post("/v1/chat/completions", body)


def drafted(answer: Any) -> tuple[int, int]:
    """Accepted and rejected guesses."""
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


FREE_JSON = {
    "messages": [{"role": "user", "content": "Give me a short JSON example about animals."}],
    "max_tokens": 100,
    "response_format": {"type": "json_object"},
    "ignore_eos": False,
}


@pytest.fixture(
    scope="module", params=[{}, {"temperature": 0.8, "seed": 11}, FREE_JSON], ids=["greedy", "seeded", "free JSON"]
)
def parameters(request: pytest.FixtureRequest) -> dict[str, Any]:
    parameters: dict[str, Any] = request.param
    return parameters


@pytest.fixture(scope="module")
def plain(cluster: RunningCluster, parameters: dict[str, Any]) -> list[int]:
    """The tokens without speculation."""
    answer = ask(cluster, "none", **parameters)
    assert drafted(answer) == (0, 0)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("method", ["auto", "eagle3", "suffix", "ngram", "lookahead", None])
def test_tokens_match_decoding_without_speculation(
    cluster: RunningCluster, method: str | None, parameters: dict[str, Any], plain: list[int]
) -> None:
    answer = ask(cluster, method, **parameters)
    assert answer["choices"][0]["token_ids"] == plain
    accepted, rejected = drafted(answer)
    assert accepted <= answer["usage"]["completion_tokens"]
    if method not in ("auto", None):
        assert accepted + rejected > 0


def test_drafts_of_the_bundled_head_are_sometimes_accepted(cluster: RunningCluster) -> None:
    accepted, rejected = drafted(ask(cluster, "eagle3"))
    assert accepted >= 10
    assert rejected > 0
    lines = httpx.get(cluster.endpoint + "/metrics", timeout=30).text.splitlines()
    (line,) = [line for line in lines if line.startswith("baton_worker_accepted_tokens") and 'method="eagle3"' in line]
    assert float(line.rsplit(" ", 1)[1]) >= accepted
    assert cluster.metric("baton_worker_draft_failures_total") == 0


def test_a_method_whose_draft_is_not_loaded_is_refused(cluster: RunningCluster) -> None:
    client = OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0)
    with pytest.raises(Exception, match=r"medusa needs a draft of that kind.*the loaded draft is for eagle3"):
        client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=4, extra_body={"speculation": {"method": "medusa"}}
        )


def test_the_timeline_reports_the_drafts(cluster: RunningCluster) -> None:
    answer = ask(cluster, "eagle3")
    accepted, rejected = drafted(answer)
    timeline = cluster.get(f"/v1/requests/{answer['id']}/timeline")
    attributes = timeline["attributes"]
    assert (attributes["accepted_tokens"], attributes["drafted_tokens"]) == (accepted, accepted + rejected)
    assert timeline["drafts"] == {"eagle3": {"drafted_tokens": accepted + rejected, "accepted_tokens": accepted}}


@pytest.mark.parametrize("method", ["eagle3", "suffix", "none"])
def test_a_trace_tells_the_tokens_and_what_was_drafted(
    cluster: RunningCluster, method: str, parameters: dict[str, Any], plain: list[int]
) -> None:
    answer = ask(cluster, None, speculation={"method": method, "trace": True}, **parameters)
    [choice] = answer["choices"]
    rounds = choice["speculation"]["rounds"]
    assert [token for one in rounds for token in one["output"]["token_ids"]] == choice["token_ids"] == plain
    accepted, rejected = drafted(answer)
    assert sum(len(one["draft"]["token_ids"]) for one in rounds) == accepted + rejected
    assert sum(one["output"]["verdicts"].count("accepted") for one in rounds) == accepted
    assert {one["method"] for one in rounds if one["draft"]["token_ids"]} <= {method}
    timeline = cluster.get(f"/v1/requests/{answer['id']}/timeline")
    assert timeline["speculation"] == choice["speculation"]

"""What a request's parameters do to single tokens is computed once, however many steps follow."""

from __future__ import annotations

import pytest

from baton.core.request import FinishReason, Request, SamplingParams
from baton.core.token_edits import TokenEdits
from baton.engine.sampling.verification import sampling_row

EOS = frozenset({2})
PARAMS = {"max_tokens": 9, "stop_token_ids": (7, 5), "logit_bias": ((3, 1.5), (4, -2.0))}


@pytest.mark.parametrize(
    ("changes", "stop_ids", "held_back"),
    [
        ({}, {2, 5, 7}, []),
        ({"min_tokens": 1}, {2, 5, 7}, [2, 5, 7]),
        ({"min_tokens": 1, "ignore_eos": True}, {5, 7}, [5, 7]),
        ({"stop_token_ids": ()}, {2}, []),
    ],
)
def test_edits_follow_the_parameters(changes: dict[str, object], stop_ids: set[int], held_back: list[int]) -> None:
    edits = SamplingParams(**{**PARAMS, **changes}).token_edits(EOS)  # type: ignore[arg-type]
    assert edits.stop_ids == stop_ids
    assert edits.held_back_ids.tolist() == held_back
    assert (edits.bias_ids.tolist(), edits.biases.tolist()) == ([3, 4], [1.5, -2.0])


def test_steps_build_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("a", [1], SamplingParams(**PARAMS, min_tokens=2), EOS)  # type: ignore[arg-type]
    monkeypatch.setattr(TokenEdits, "of", None)
    assert sampling_row(request).edits is sampling_row(request, [3]).edits is request.edits
    assert [request.append_output(token) for token in (5, 2, 9, 7)] == [None, None, None, FinishReason.STOP]

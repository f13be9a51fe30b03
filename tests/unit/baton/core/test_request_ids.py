"""Ids of requests on the workers lead back to what a client knows."""

from __future__ import annotations

import pytest

from baton.core.request_ids import new_call_id, request_id_of_call


def test_every_attempt_has_a_unique_id() -> None:
    assert len({new_call_id("r") for _ in range(100)}) == 100


@pytest.mark.parametrize("request_id", ["r", "chatcmpl-1f", "my.own_id-3", "cmpl-1f-2"])
def test_a_call_id_leads_back_to_its_request_id(request_id: str) -> None:
    call_id = new_call_id(request_id)
    assert request_id_of_call(call_id) == request_id
    assert request_id_of_call(f"{call_id}#7") == request_id
    assert request_id_of_call(request_id) == request_id

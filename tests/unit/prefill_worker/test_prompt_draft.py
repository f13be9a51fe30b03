"""A draft over prompts: left out when it breaks, tried again when the engine can free memory for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from prefill_worker.prompt_draft import PromptDraft


class State:
    """Raises ``error`` whenever it is used."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def computed(self, batch: object, results: object) -> None:
        if self.error is not None:
            raise self.error

    def export_state(self, request_id: str) -> bytes:
        return b"state"


def compute(draft: PromptDraft) -> None:
    draft.computed(None, torch.zeros(0), {})  # type: ignore[arg-type]


def no_memory() -> Exception:
    return torch.OutOfMemoryError("no memory")


def broken() -> Exception:
    return RuntimeError("a bug")


@pytest.mark.parametrize(("make", "retries"), [(no_memory, 1), (broken, 0)])
def test_a_draft_that_keeps_failing_is_disabled(make: Callable[[], Exception], retries: int) -> None:
    state = State()
    state.error = make()
    draft = PromptDraft(state)  # type: ignore[arg-type]
    for _ in range(retries):
        with pytest.raises(torch.OutOfMemoryError):
            compute(draft)
    compute(draft)
    assert draft.num_failures == 1
    assert draft.export_state("a") is None


def test_a_draft_that_occasionally_lacks_memory_is_kept() -> None:
    state = State()
    draft = PromptDraft(state)  # type: ignore[arg-type]
    for _ in range(3):
        state.error = no_memory()
        with pytest.raises(torch.OutOfMemoryError):
            compute(draft)
        state.error = None
        compute(draft)
    assert draft.export_state("a") == b"state"
    assert draft.num_failures == 0


def test_a_lost_device_is_not_attributed_to_the_draft() -> None:
    state = State()
    state.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    draft = PromptDraft(state)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            compute(draft)
    assert draft.num_failures == 0

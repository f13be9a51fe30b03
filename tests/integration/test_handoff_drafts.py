"""Drafts across the hand-off: what the decode worker guesses is what an aggregated engine would have guessed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from baton.core.drafts import Draft
from baton.core.errors import BatonError
from baton.core.request import SamplingParams
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.loading import LoadedDraft
from baton.engine.draft.medusa.heads import load_medusa
from baton.engine.draft.model.draft_model import DraftModel
from baton.engine.models.model_loader import prepare_model
from decode_worker.speculation.controller import RegisteredMethod, SpeculationController
from decode_worker.speculation.draft_length import DraftPasses, VerificationPolicy
from tests.drafting import Recording
from tests.integration.worker_pair import Answer, Runners, WorkerPair, pair_config, worker_pair
from tests.tiny_drafts import (
    VOCAB,
    tiny_draft_lm,
    tiny_eagle,
    tiny_eagle3,
    tiny_medusa_v1,
    tiny_speculators,
    tiny_target,
)

CPU = torch.device("cpu")
MakeDraft = Callable[[PreTrainedModel], LoadedDraft]


@pytest.fixture(autouse=True)
def _whole_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that go by what passes and steps take here and now would differ from one engine to the other."""

    def whole(self: VerificationPolicy, drafts: Mapping[str, Draft], *_: object, **__: object) -> dict[str, int]:
        return {request_id: len(draft) for request_id, draft in drafts.items()}

    monkeypatch.setattr(DraftPasses, "another", lambda self, chances: True)
    monkeypatch.setattr(VerificationPolicy, "choose", whole)


def eagle(name: str, folder: Path, seed: int = 2) -> MakeDraft:
    kinds = {
        "eagle": lambda: tiny_eagle(seed),
        "eagle3": lambda: tiny_eagle3(seed),
        "two layers": lambda: tiny_speculators(seed, num_layers=2),
    }
    path = kinds[name]().write(folder / f"{name}-{seed}")
    method = "eagle" if name == "eagle" else "eagle3"
    return lambda target: LoadedDraft(method, name, load_eagle(path, target, torch.float32, CPU))


def medusa(folder: Path) -> MakeDraft:
    path = tiny_medusa_v1().write(folder / "medusa", "medusa_lm_head.pt")
    return lambda target: LoadedDraft("medusa", "medusa", load_medusa(path, target, torch.float32, CPU))


def draft_model(target: PreTrainedModel) -> LoadedDraft:
    return LoadedDraft("draft_model", "small", DraftModel(prepare_model(tiny_draft_lm(), "float32"), VOCAB))


def make(name: str, folder: Path) -> MakeDraft:
    if name == "medusa":
        return medusa(folder)
    return draft_model if name == "draft_model" else eagle(name, folder)


DRAFTS = ("eagle", "eagle3", "two layers", "medusa", "draft_model")
KINDS = [
    name
    if name in ("eagle3", "medusa", "draft_model")
    else pytest.param(name, marks=pytest.mark.thorough(covered_by="[eagle3]"))
    for name in DRAFTS
]
"""One draft for each kind of state on a worker."""
PARAMS = SamplingParams(max_tokens=12, temperature=0)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 90, (length,), generator=generator).tolist() for length in (3, 8, 21, 70)]


def record(pair: WorkerPair) -> Recording:
    """Spies on the decode worker's only method with a network."""
    controller = pair.decode.role._engine._engine.proposer
    name, own = network_method(controller)
    recording = Recording(own.method)
    controller._methods[name] = replace(own, method=recording)
    return recording


def network_method(controller: SpeculationController) -> tuple[str, RegisteredMethod]:
    """The only method with a network, and its name."""
    ((name, own),) = ((name, own) for name, own in controller._methods.items() if own.state is not None)
    return name, own


def by_length(recording: Recording) -> dict[int, tuple[int, ...]]:
    """Drafted tokens by the number of tokens known; one request at a time, so its name does not matter."""
    return {num_tokens: draft.token_ids for (_, num_tokens), draft in recording.drafts.items()}


def settings(method: str) -> dict[str, object]:
    return {"method": method, "max_draft_tokens": 5, "max_tree_tokens": 5, "tree_max_batch": 0}


@pytest.mark.parametrize("name", DRAFTS)
async def test_drafts_match_those_of_a_single_engine(name: str, tmp_path: Path) -> None:
    make_draft = make(name, tmp_path)
    runners = Runners.with_drafts(tiny_target(), make_draft, make_draft)
    assert runners.prefill_draft is not None
    method = runners.prefill_draft.method
    config = pair_config(speculation=settings(method), prefill={"chunk_tokens": 16})

    drafted, answers = [], []
    for prompt in prompts():
        async with worker_pair(runners, config) as pair:
            recording = record(pair)
            answer = await pair.generate(prompt, PARAMS)
            drafted.append(by_length(recording))
            answers.append(answer.token_ids)
            assert answer.handoff is not None
            assert answer.handoff.num_bytes == len(prompt) * runners.prefill.spec.bytes_per_token
            await pair.settle()

    for prompt, own, answer in zip(prompts(), drafted, answers, strict=True):
        async with worker_pair(runners, config) as pair:
            recording = record(pair)
            alone = Answer()  # the decode worker by itself computes the prompt and everything behind it
            await pair.continue_from(alone, "alone", prompt, PARAMS)
            assert alone.token_ids == answer
            aggregated = by_length(recording)
        first = len(prompt) + 1
        assert own[first] == aggregated[first], "the first round"
        assert own == aggregated


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("has", ["decode", "prefill"])
async def test_a_draft_on_one_side_changes_no_token(name: str, has: str, tmp_path: Path) -> None:
    make_draft = make(name, tmp_path)
    plain = Runners.of(tiny_target())
    async with worker_pair(plain, pair_config(speculation={"method": "none"})) as pair:
        expected = await pair.generate_all(prompts(), PARAMS)
    runners = Runners.with_drafts(
        tiny_target(), make_draft if has == "prefill" else None, make_draft if has == "decode" else None
    )
    method = make_draft(tiny_target()).method if has == "decode" else "auto"
    async with worker_pair(runners, pair_config(speculation=settings(method))) as pair:
        recording = record(pair) if has == "decode" else None
        assert await pair.generate_all(prompts(), PARAMS) == expected
        assert await pair.generate_all(prompts(), PARAMS) == expected, "now with cached prefixes"
        if recording is not None:
            assert len(recording.drafts) > 20
            assert pair.decode.role._engine._engine.proposer.num_failures == 0
        answer = await pair.generate(prompts()[-1][::-1], PARAMS)
        assert answer.handoff is not None
        spec = runners.prefill.spec
        assert answer.handoff.num_bytes == 70 * spec.layer_bytes_per_token(0, len(spec.layers)), "the model's KV only"
        await pair.settle()


async def test_different_drafts_on_the_two_sides_do_not_mix(tmp_path: Path) -> None:
    runners = Runners.with_drafts(tiny_target(), eagle("eagle3", tmp_path, seed=2), eagle("eagle3", tmp_path, seed=7))
    plain = Runners.of(tiny_target())
    async with worker_pair(plain, pair_config(speculation={"method": "none"})) as pair:
        expected = await pair.generate_all(prompts(), PARAMS)
    async with worker_pair(runners, pair_config(speculation=settings("eagle3"))) as pair:
        assert await pair.generate_all(prompts(), PARAMS) == expected
        assert pair.decode.role._engine._engine.proposer.num_failures == 0
        await pair.settle()


@pytest.mark.parametrize(
    ("side", "what"),
    [("prefill", "computed"), ("prefill", "flush"), ("prefill", "release"), ("prefill", "export_state"),
     ("decode", "computed"), ("decode", "release"), ("decode", "adopt"), ("decode", "keep"), ("decode", "propose")],
)  # fmt: skip
@pytest.mark.parametrize(
    "name",
    [
        "eagle3",
        *(pytest.param(n, marks=pytest.mark.thorough(covered_by="[eagle3]")) for n in ("medusa", "draft_model")),
    ],
)
async def test_a_draft_that_fails_while_serving_costs_no_request(
    name: str, side: str, what: str, tmp_path: Path
) -> None:
    make_draft = make(name, tmp_path)
    runners = Runners.with_drafts(tiny_target(), make_draft, make_draft)
    plain = Runners.of(tiny_target())
    async with worker_pair(plain, pair_config(speculation={"method": "none"})) as pair:
        expected = await pair.generate_all(prompts(), PARAMS)
    assert runners.decode_draft is not None
    async with worker_pair(runners, pair_config(speculation=settings(runners.decode_draft.method))) as pair:
        role = pair.prefill.role if side == "prefill" else pair.decode.role
        proposer = role._engine._engine.proposer
        state = proposer._state if side == "prefill" else network_method(proposer)[1].state

        def broken(*_: object) -> None:
            raise RuntimeError("the draft's memory is gone")

        work = asyncio.gather(*(pair.generate(prompt, PARAMS) for prompt in prompts()), return_exceptions=True)
        await asyncio.sleep(0.05)
        broken_part = network_method(proposer)[1].method if what == "propose" else state
        setattr(broken_part, what, broken)
        answers = await work
        assert not [answer for answer in answers if isinstance(answer, BatonError | Exception)]
        assert [answer.token_ids for answer in answers] == expected
        assert await pair.generate_all(prompts(), PARAMS) == expected
        assert proposer.num_failures == 1
        await pair.settle()

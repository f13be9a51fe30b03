"""Whenever a device runs what its streams hold, tokens are the model's, and accesses to memory are ordered."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import baton.engine.batch.batch
import baton.engine.kv_cache.kv_copies
from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import SamplingParams
from baton.engine.device.downloads import Download
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.kv_copies import CudaCopyQueue, WorkMark
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_cost_model import StepCostModel
from baton.engine.step.overlap import always, never
from decode_worker.kv_import import Import, KVImporter
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle.proposer import EagleProposer
from decode_worker.speculation.verification import SampleAndMatch
from prefill_worker.kv_export import ComputedStep
from tests.device_tensors import DeviceTensors
from tests.drafting import Unweighed
from tests.engine_runs import build_engine, build_runner, run
from tests.fake_cuda import fake_cuda
from tests.stream_checker import Device, Schedule
from tests.streamed_handoff import BLOCK_SIZE, Turns, TurnTaking, device_runner, handoff
from tests.tiny_drafts import VOCAB, TinyDraft, tiny_eagle, tiny_eagle3, tiny_target
from tests.tiny_models import random_prompts, tiny_model
from tests.toy_proposers import Oracle

PROMPTS = random_prompts((3, 9, 14, 22, 17, 6))
NUM_TOKENS = 5
NEVER = NUM_TOKENS + 1
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    if index % 2
    else SamplingParams(max_tokens=NUM_TOKENS, top_p=0.8, top_k=20, logprobs=1, repetition_penalty=1.2, seed=index)
    for index in range(len(PROMPTS))
]


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        chosen: places of prompts, and with how many tokens their request gives up; 0 for one that is not handed off.
        eagerness: see :class:`tests.stream_checker.Schedule`; nothing for the latest of all orders.
        in_turn: each request comes when the one before it is done.
        num_blocks: of each cache.
    """

    chosen: Sequence[tuple[int, int]]
    seed: int = 0
    eagerness: Sequence[float] = ()
    num_blocks: int = 20
    chunk_tokens: int = 8
    part_bytes: int = 1024
    runs_ahead: bool = True
    graphs: bool = False
    in_turn: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chosen = st.tuples(st.integers(0, len(PROMPTS) - 1), st.sampled_from((0, 1, 2, 3, NEVER)))
    chances = st.sampled_from((0.0, 0.1, 0.5, 1.0))
    return Case(
        chosen=draw(st.lists(chosen, min_size=2, max_size=5)),
        seed=draw(st.integers(0, 2**32 - 1)),
        # The default stream, then each engine's own, its cache's outgoing and its incoming one.
        eagerness=draw(st.lists(chances, max_size=7)),
        num_blocks=draw(st.sampled_from((8, 12, 20))),
        chunk_tokens=draw(st.sampled_from((4, 8, 64))),
        part_bytes=draw(st.sampled_from((512, 2048))),
        runs_ahead=draw(st.booleans()),
        graphs=draw(st.booleans()),
        in_turn=draw(st.booleans()),
    )


ALL = Case([(3, 1), (2, 3), (4, NEVER), (1, 0)], num_blocks=9)


class Model:
    """The model, and the tokens that it gives for each prompt where nothing is late."""

    def __init__(self) -> None:
        self.model: PreTrainedModel = tiny_model("llama")
        outcomes = run(build_engine(build_runner(self.model, decoder="transformers")), PROMPTS, PARAMS)
        self.tokens = [outcome.token_ids for outcome in outcomes]

    def check(self, case: Case) -> Device:
        """Raises AssertionError when tokens depend on the order, or could in another one."""
        chance = random.Random(case.seed)
        device = Device(Schedule(chance, case.eagerness) if case.eagerness else Schedule.latest())
        turns = Turns(chance)
        found: list[list[int]] = []
        with fake_cuda(device) as tensors, asyncio.Runner(loop_factory=lambda: TurnTaking(turns)) as runner:
            try:
                found = runner.run(self._generate_all(case, tensors, turns))
            except Exception as error:  # noqa: BLE001 - what made requests fail may be among the faults
                device.faults.append(repr(error))
        device.check()
        expected = [self.tokens[index][: gives_up_at or None] for index, gives_up_at in case.chosen]
        assert found == expected
        return device

    def check_all(self, cases: Iterable[Case]) -> None:
        """:meth:`check` for each."""
        for case in cases:
            self.check(case)

    async def _generate_all(self, case: Case, tensors: DeviceTensors, turns: Turns) -> list[list[int]]:
        runners = []
        for _ in range(2):
            with tensors.device.stream(tensors.device.new_stream()):
                own = copy.deepcopy(self.model)
                runners.append(device_runner(tensors, own, case.num_blocks, graphs=case.graphs))
        tensors.device.synchronize()
        settings = {"chunk_tokens": case.chunk_tokens, "part_bytes": case.part_bytes}
        async with handoff(*runners, turns, runs_ahead=always if case.runs_ahead else never, **settings) as pair:
            calls = [
                pair.generate(f"{number}", PROMPTS[index], PARAMS[index], gives_up_at)
                if gives_up_at
                else pair.generate_alone(f"{number}", PROMPTS[index], PARAMS[index])
                for number, (index, gives_up_at) in enumerate(case.chosen)
            ]
            found = [await call for call in calls] if case.in_turn else await asyncio.gather(*calls)
            await pair.settle()
            return found


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(autouse=True)
def _copies_may_soon_be_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.engine.kv_cache.kv_copies, "MAX_BEHIND_BYTES", 4096)


@settings(max_examples=4)
@given(case=cases())
def test_tokens_do_not_depend_on_device_timing(model: Model, case: Case) -> None:
    model.check(case)


@pytest.mark.thorough(covered_by="test_tokens_do_not_depend_on_device_timing")
@settings(max_examples=100)
@given(case=cases())
def test_tokens_do_not_depend_on_device_timing_in_many_cases(model: Model, case: Case) -> None:
    model.check(case)


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_the_same_when_everything_runs_as_late_as_possible(model: Model, *, graphs: bool) -> None:
    device = model.check(replace(ALL, graphs=graphs))
    assert device.num_streams == 7  # the default one, and three of each engine


def test_draft_trees_change_no_token(model: Model) -> None:
    """Accepted nodes are moved in the cache while the next step is made."""
    device = Device(Schedule(random.Random(1)))
    with fake_cuda(device) as tensors:
        runner = device_runner(tensors, copy.deepcopy(model.model), 64)
        truth = {f"request-{index}": tokens for index, tokens in enumerate(model.tokens)}
        oracle = Oracle(truth, "half right", "tree")
        scheduler = Scheduler(SchedulerLimits(8, 8, 64), BlockManager(64, BLOCK_SIZE))
        outcomes = run(Engine(runner, scheduler, SampleAndMatch(), oracle), PROMPTS, PARAMS)
    device.check()
    assert [outcome.token_ids for outcome in outcomes] == model.tokens
    assert oracle.num_accepted > 0


@pytest.mark.parametrize(
    "make", [pytest.param(tiny_eagle, marks=pytest.mark.thorough(covered_by="[tiny_eagle3]")), tiny_eagle3]
)
def test_draft_passes_change_no_token(make: Callable[[], TinyDraft], tmp_path: Path) -> None:
    device, found = Device(Schedule(random.Random(1))), []
    prompts = [[token % VOCAB for token in prompt] for prompt in PROMPTS[:2]]
    with fake_cuda(device) as tensors:
        for is_late in (False, True):
            target = tiny_target()
            if is_late:
                tensors.take_over(target)
            head = load_eagle(make().write(tmp_path), target, torch.float32, torch.device("cpu"))
            if is_late:
                tensors.take_over(head)
                runner = device_runner(tensors, target, 64, draft=head)
            else:
                runner = ModelRunner(
                    prepare_model(target, "float32"), 64, BLOCK_SIZE, RunnerOptions(decoder="transformers"), draft=head
                )
            scheduler = Scheduler(SchedulerLimits(8, 8, 64), BlockManager(64, BLOCK_SIZE))
            passes = DraftPasses(StepCostModel())
            proposer = Unweighed(EagleProposer(FeatureState(head, runner, weights="native"), passes))
            drafting = Engine(runner, scheduler, SampleAndMatch(), proposer, max_draft_tokens=3)
            found.append([outcome.token_ids for outcome in run(drafting, prompts, PARAMS[:2])])
    device.check()
    assert found[0] == found[1]


# ------------------------------------------------------------------- faults that would not show where copies are quick


def bring_at_once(queue: CudaCopyQueue, copy: Callable[[], None], after: WorkMark, num_bytes: int) -> WorkMark:
    with torch.cuda.stream(queue._incoming):
        copy()
        brought = baton.engine.kv_cache.kv_copies._record(queue._incoming)
    return brought


def fetch_at_once(queue: CudaCopyQueue, copy: Callable[[], None], after: WorkMark) -> None:
    with torch.cuda.stream(queue._outgoing):
        copy()
        done = baton.engine.kv_cache.kv_copies._record(queue._outgoing)
    queue.wait(done)


class OneStage:
    """Uploads from one pinned buffer, which the next upload overwrites."""

    def __init__(self) -> None:
        self._stage: torch.Tensor | None = None

    def __call__(self, array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
        source = torch.from_numpy(array)
        if self._stage is None:
            self._stage = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
        stage = self._stage[: source.nbytes].view(source.dtype).view(source.shape)
        return stage.copy_(source).to(device, non_blocking=True)


def free_at_once(importer: KVImporter, entry: Import) -> None:
    if entry.holder is not None:
        importer._engine.blocks.free(entry.holder)
        importer._holders.discard(entry.holder)
        importer._engine.notify_freed_threadsafe()


def read_at_once(download: Download) -> torch.Tensor:
    return download._host


def lease_nothing(pool: BlockPool, lease_id: str, block_ids: Sequence[int]) -> None:
    pass


async def go_on(step: ComputedStep) -> None:
    pass


TIGHT = Case([(3, NEVER), (4, NEVER)], num_blocks=7)
INCOMING = "index_copy_ in stream 6 .*paged_cache.py"
OUTGOING = "index_select in stream 2 .*paged_cache.py"

FAULTS: dict[str, tuple[Case, Sequence[tuple[Any, str, Any]], str]] = {
    "parts come in before the blocks are free": (
        replace(TIGHT, chosen=[(3, 3), (4, NEVER)], in_turn=True),
        [(CudaCopyQueue, "bring", bring_at_once)],
        f"{INCOMING}.* writes what was (read|written) by .* in stream 4 .*kernel_attention|"
        f"index_copy_ in stream 4 .* writes what was written by {INCOMING}",
    ),
    "blocks are given away while parts come in": (
        replace(TIGHT, chosen=[(3, 1), (4, 0)], in_turn=True, chunk_tokens=4),
        [(KVImporter, "_free", free_at_once)],
        f"in stream 4 .* writes what was written by {INCOMING}|{INCOMING}.* writes what was .* in stream 4",
    ),
    "a step does not wait for what came in": (
        TIGHT,
        [(CudaCopyQueue, "join", lambda queue, brought: None)],
        f"attend in stream 4 .* reads what was written by {INCOMING}|{INCOMING}.* writes what was read by attend",
    ),
    "parts leave before they are computed": (
        TIGHT,
        [(CudaCopyQueue, "fetch", fetch_at_once), (ComputedStep, "done", go_on)],
        f"{OUTGOING}.* reads what was written by index_copy_|in stream 1 .* writes what was read by {OUTGOING}",
    ),
    "blocks are given away while they are read": (
        replace(TIGHT, chosen=[(3, NEVER), (4, NEVER), (3, NEVER)]),
        [(BlockPool, "lease", lease_nothing), (BlockPool, "end_lease", lambda pool, lease_id: None)],
        f"writes what was read by {OUTGOING}|{OUTGOING}.* reads what was written by index_copy_|At index . diff",
    ),
    "a pinned buffer is used again before it is copied": (
        TIGHT,
        [(baton.engine.batch.batch, "upload", OneStage())],
        "not finite",
    ),
    "tokens are read before they are there": (TIGHT, [(Download, "read", read_at_once)], "the token id -1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_synchronization_is_found(model: Model, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    case, replaced, message = FAULTS[fault]
    for owner, name, replacement in replaced:
        monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(AssertionError, match=message):
        model.check_all(replace(case, seed=seed) for seed in range(4))  # not every order of the threads shows it

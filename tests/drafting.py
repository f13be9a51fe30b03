"""Runs requests through an engine with a speculation method, and records the drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import Proposer, VerifyResult
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.loading import LoadedDraft
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from benchmarks.device_run.attention_world import poison
from decode_worker.speculation.controller import RegisteredMethod, SpeculationController
from decode_worker.speculation.method import DraftMethod, ReadsForwards
from decode_worker.speculation.verification import create_verifier
from tests.tiny_drafts import VOCAB, TinyDraft, tiny_target

BLOCK_SIZE = 4
MAX_DRAFT_TOKENS = 5


class Unweighed:
    """Adapts a method to the engine without a controller, which would leave out drafts that do not pay."""

    def __init__(self, method: DraftMethod | Proposer) -> None:
        self.method = method

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        return self.method.propose(plan, room)

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        if isinstance(self.method, ReadsForwards):
            self.method.computed(batch, logits, results)

    def observe(self, result: VerifyResult) -> None:
        self.method.observe(result)

    def release(self, request_id: str) -> None:
        self.method.release(request_id)


class Recording(Unweighed):
    """Records a method's drafts and their outcome. Requests that forbid speculation get no drafts.

    Attributes:
        drafts: drafts by request id and number of known tokens.
        accepted: accepted tokens of each sequence and step, in order.
        change: maps a draft to the one that is verified.
    """

    def __init__(self, method: DraftMethod, change: Callable[[Draft], Draft] = lambda draft: draft) -> None:
        super().__init__(method)
        self.outlook = method.outlook
        self.drafts: dict[tuple[str, int], Draft] = {}
        self.accepted: list[int] = []
        self._change = change

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        willing = {s.request.request_id for s in plan if s.request.speculation_method != "none"}
        drafts = super().propose(plan, {name: limit for name, limit in room.items() if name in willing})
        assert drafts.keys() <= willing
        for sequence in plan:
            request = sequence.request
            if request.request_id in drafts:
                self.drafts[request.request_id, request.num_tokens] = drafts[request.request_id]
        return {name: self._change(draft) for name, draft in drafts.items()}

    def observe(self, result: VerifyResult) -> None:
        self.accepted.append(len(result.accepted))
        super().observe(result)


class Eager(SpeculationController):
    """Drafts independently of measured costs: an engine that is not given its cost model learns in another one."""


def registered(
    methods: Mapping[str, DraftMethod], max_tokens: int, *, is_automatic: bool = True
) -> dict[str, RegisteredMethod]:
    """Entries of methods without a network."""
    return {name: RegisteredMethod(own, max_tokens, is_automatic=is_automatic) for name, own in methods.items()}


def engine_over(
    runner: ModelRunner,
    proposer: Proposer | None = None,
    *,
    chunk_tokens: int = 32,
    num_blocks: int | None = None,
    acceptance: str = "match",
) -> Engine:
    blocks = BlockManager(num_blocks or runner.cache.num_blocks, runner.spec.block_size)
    scheduler = Scheduler(SchedulerLimits(chunk_tokens, 8, 120), blocks)
    return Engine(runner, scheduler, create_verifier(acceptance), proposer, max_draft_tokens=MAX_DRAFT_TOKENS)


class DraftSetup(ABC):
    """A tiny target and a draft over one cache, which holds no numbers at first.

    Attributes:
        recording: the draft's method, with a record of its drafts.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: LoadedDraft,
        *,
        num_blocks: int = 96,
        change: Callable[[Draft], Draft] = lambda draft: draft,
    ) -> None:
        self.runner = ModelRunner(prepare_model(target, "float32"), num_blocks, BLOCK_SIZE, draft=draft)
        poison(self.runner.cache)
        self.recording = Recording(self.make_method(), change)
        self.drafts = self.recording.drafts

    @abstractmethod
    def make_method(self) -> DraftMethod:
        """The draft's method over ``self.runner``."""

    def plain(self) -> Engine:
        return engine_over(self.runner)

    def speculating(
        self, *, chunk_tokens: int = 32, num_blocks: int | None = None, acceptance: str = "match"
    ) -> Engine:
        return engine_over(
            self.runner, self.recording, chunk_tokens=chunk_tokens, num_blocks=num_blocks, acceptance=acceptance
        )


class EagleSetup(DraftSetup):
    """With an EAGLE head of random weights.

    Attributes:
        untouched: the target as transformers computes it.
    """

    def __init__(self, make: Callable[[], TinyDraft], folder: Path) -> None:
        self.untouched = tiny_target()
        target = tiny_target()
        self.head: EagleHead = load_eagle(make().write(folder), target, torch.float32, torch.device("cpu"))
        super().__init__(target, self.head)

    @torch.inference_mode()
    def fused_states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """What the head reads of the target behind some tokens, over the whole sequence and without a cache.

        Returns:
            ``[len(token_ids), hidden_size]``
        """
        states = self.untouched(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        return self.head.fuse(torch.cat([states[layer][0] for layer in self.head.feature_layers], dim=-1))


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Runs requests to their end; returns the output tokens of each."""
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work():
        engine.step()
    assert engine.scheduler.blocks.check([]) == []
    return [request.output_token_ids for request in requests]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 90, (length,), generator=generator).tolist() for length in lengths]


def requests_for(
    texts: Sequence[Sequence[int]], max_tokens: int = 20, plain: Sequence[int] = (), prefix: str = ""
) -> list[Request]:
    """Requests, of which every other one is sampled; those in ``plain`` forbid speculation."""
    return [
        Request(
            f"{prefix}{index}",
            list(text),
            SamplingParams(max_tokens=max_tokens, temperature=0.7 * (index % 2), seed=index),
            arrival_s=index,
            speculation_method="none" if index in plain else None,
        )
        for index, text in enumerate(texts)
    ]


def bushy(draft: Draft) -> Draft:
    """A tree with the draft's first tokens as its last nodes; the other nodes are wrong."""
    tokens, wrong = draft.token_ids[:2], (draft.token_ids[0] + 1) % VOCAB
    parents = (ROOT, ROOT, 1)[: len(tokens) + 1]
    return Draft((wrong, *tokens), parents, (0.5,) * len(parents))

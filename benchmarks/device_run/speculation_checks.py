"""Checks that every speculation method gives the tokens of plain decoding, whether drafts are accepted or not.

The proposers are called directly: in a worker, the controller would leave out drafts that do not pay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from baton.engine.contracts import DraftNetwork
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.medusa.heads import MedusaHeads, load_medusa
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.draft.model.draft_model import DraftModel
from baton.engine.draft.model.token_state import TokenState
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.scheduling.step_cost_model import StepCostModel
from benchmarks.device_run.architecture_checks import BLOCK_SIZE, NUM_BLOCKS, compared
from benchmarks.device_run.attention_world import poison
from benchmarks.device_run.part import Row
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.draft_model import DraftModelProposer
from decode_worker.speculation.eagle.proposer import EagleProposer
from decode_worker.speculation.eagle.tree_drafter import TreeSettings
from decode_worker.speculation.lookahead import LookaheadProposer
from decode_worker.speculation.medusa import MedusaProposer
from decode_worker.speculation.method import DraftMethod
from decode_worker.speculation.ngram import NgramProposer
from decode_worker.speculation.suffix import SuffixProposer
from tests.drafting import MAX_DRAFT_TOKENS, Recording, engine_over, prompts, requests_for
from tests.drafting import run as run_requests
from tests.tiny_drafts import TinyDraft, tiny_draft_lm, tiny_eagle, tiny_eagle3, tiny_medusa_v1, tiny_target
from tests.tiny_models import tiny_model
from tests.toy_proposers import Oracle

_TREE = TreeSettings(top_k=2, max_depth=3, max_nodes=MAX_DRAFT_TOKENS, max_batch=8, max_chain=MAX_DRAFT_TOKENS)
_MAX_MODEL_LEN = 120
_MAX_TOKENS = 16

LoadNetwork = Callable[[PreTrainedModel], DraftNetwork]
Truth = Mapping[str, Sequence[int]]
MakeProposer = Callable[[ModelRunner, DraftNetwork | None, Truth], DraftMethod]


@dataclass(frozen=True, slots=True)
class Method:
    """A speculation method under test.

    Attributes:
        make_proposer: makes a proposer from the runner, the network, and each request's tokens without speculation.
        load_network: loads the method's network for a target on its device; ``None`` means no network.
        is_right: whether some of its drafts must be accepted.
        rounds: how often the same requests are sent; some methods learn from earlier requests.
    """

    make_proposer: MakeProposer
    load_network: LoadNetwork | None = None
    is_right: bool = False
    rounds: int = 1


def _eagle(make: Callable[[], TinyDraft]) -> LoadNetwork:
    return lambda target: _loaded(make(), lambda folder: load_eagle(folder, target, torch.float32, target.device))


def _medusa(target: PreTrainedModel) -> DraftNetwork:
    return _loaded(tiny_medusa_v1(), lambda folder: load_medusa(folder, target, torch.float32, target.device))


def _draft_model(make: Callable[[], PreTrainedModel]) -> LoadNetwork:
    def load(target: PreTrainedModel) -> DraftNetwork:
        model: Any = make()
        draft = prepare_model(model.to(target.device), "float32")
        return DraftModel(draft, min(draft.vocab_size, int(target.config.vocab_size)))

    return load


def _loaded(draft: TinyDraft, load: Callable[[Path], DraftNetwork]) -> DraftNetwork:
    with tempfile.TemporaryDirectory() as folder:
        return load(draft.write(Path(folder)))


def _chains(runner: ModelRunner, network: DraftNetwork | None, truth: Truth) -> DraftMethod:
    return EagleProposer(FeatureState(cast(EagleHead, network), runner), DraftPasses(StepCostModel()))


def _trees(runner: ModelRunner, network: DraftNetwork | None, truth: Truth) -> DraftMethod:
    return EagleProposer(FeatureState(cast(EagleHead, network), runner), DraftPasses(StepCostModel()), trees=_TREE)


def _heads(runner: ModelRunner, network: DraftNetwork | None, truth: Truth) -> DraftMethod:
    return MedusaProposer(MedusaState(cast(MedusaHeads, network), runner), DraftPasses(StepCostModel()))


def _tokens(runner: ModelRunner, network: DraftNetwork | None, truth: Truth) -> DraftMethod:
    return DraftModelProposer(TokenState(cast(DraftModel, network), runner), DraftPasses(StepCostModel()))


METHODS: Mapping[str, Method] = {
    "ngram": Method(lambda *_: NgramProposer()),
    "suffix": Method(lambda *_: SuffixProposer(remembers_outputs=True), is_right=True, rounds=2),
    "lookahead": Method(lambda *_: LookaheadProposer()),
    "right chains": Method(lambda runner, _, truth: Oracle(truth, "half right"), is_right=True),
    "right trees": Method(lambda runner, _, truth: Oracle(truth, "half right", "tree"), is_right=True),
    "eagle chains": Method(_chains, _eagle(tiny_eagle)),
    "eagle trees": Method(_trees, _eagle(tiny_eagle)),
    "eagle3 chains": Method(_chains, _eagle(tiny_eagle3)),
    "eagle3 trees": Method(_trees, _eagle(tiny_eagle3)),
    "medusa trees": Method(_heads, _medusa),
    "draft model": Method(_tokens, _draft_model(tiny_draft_lm)),
    "the target as its own draft model": Method(_tokens, _draft_model(tiny_target), is_right=True),
}


def check_method(name: str, device: torch.device) -> Iterator[Row]:
    """Compares greedy and seeded requests with and without the method, without and with graphs."""
    method = METHODS[name]
    target: Any = tiny_target() if method.load_network else tiny_model("llama")
    target.to(device)
    network = None if method.load_network is None else method.load_network(target)
    loaded = prepare_model(target, "float32")
    for way in ("eager", *(["graphs"] if device.type == "cuda" else [])):
        cuda_graphs = "auto" if way == "graphs" else "off"
        runner = ModelRunner(
            loaded,
            NUM_BLOCKS,
            BLOCK_SIZE,
            RunnerOptions(decoder="transformers", cuda_graphs=cuda_graphs),
            draft=network,
        )
        texts = _texts()
        figures: dict[str, int] = {}
        if way == "graphs":
            runner.capture_graphs(len(texts), MAX_DRAFT_TOKENS, _MAX_MODEL_LEN)
            figures["graphs"] = runner.num_graphs
        poison(runner.cache)
        plain = requests_for(texts, _MAX_TOKENS)
        expected = run_requests(engine_over(runner), plain)
        poison(runner.cache)
        truth = {request.request_id: list(request.output_token_ids) for request in plain}
        proposer = Recording(method.make_proposer(runner, network, truth))
        engine = engine_over(runner, proposer)
        for index in range(method.rounds):
            found = run_requests(engine, requests_for(texts, _MAX_TOKENS, prefix="again" * index))
        accepted, drafts = sum(proposer.accepted), len(proposer.drafts)
        row = compared(f"{name}: {way}", found, expected, drafts=drafts, accepted=accepted, **figures)
        if not drafts or (method.is_right and not accepted):
            row |= {
                "ok": False,
                "error": f"{drafts} drafts, of which {accepted} tokens were accepted: nothing was checked",
            }
        yield row
        runner.close()


def _texts() -> list[list[int]]:
    """Prompts, every other one with a repetition, for methods that look for repetitions."""
    return [text * 2 if index % 2 else text for index, text in enumerate(prompts(3, 9, 14, 6))]

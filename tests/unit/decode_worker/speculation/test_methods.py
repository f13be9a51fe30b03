"""Methods without a model: their guesses, and that drafting changes no token."""

from __future__ import annotations

import random

import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.scheduler import Scheduler
from decode_worker.speculation.controller import SpeculationController
from decode_worker.speculation.method import DraftMethod
from decode_worker.speculation.ngram import NgramProposer
from decode_worker.speculation.suffix import SuffixProposer
from decode_worker.speculation.verification import SampleAndMatch
from tests.drafting import Eager, registered
from tests.engine_runs import BLOCK_SIZE, build_runner
from tests.tiny_models import tiny_model


def draft(proposer: DraftMethod, request: Request, count: int = 4) -> tuple[int, ...]:
    request.num_computed_tokens = request.num_tokens - 1
    proposals = proposer.propose([ScheduledSequence(request, 1)], {request.request_id: count})
    return proposals[request.request_id].token_ids if proposals else ()


@pytest.mark.parametrize("proposer", [NgramProposer(), SuffixProposer()], ids=["ngram", "suffix"])
def test_the_last_continuation_is_proposed(proposer: DraftMethod) -> None:
    request = Request("a", [1, 2, 3, 4, 5, 6, 7, 1, 2], SamplingParams())
    assert draft(proposer, request) == (3, 4, 5, 6)
    request.output_token_ids += [3, 4]
    assert draft(proposer, request) == (5, 6, 7, 1)
    request.output_token_ids += [9, 10, 11]
    assert draft(proposer, request) == ()


def test_the_suffix_method_remembers_outputs_of_earlier_requests() -> None:
    proposer = SuffixProposer(remembers_outputs=True)
    first = Request("a", [50, 51], SamplingParams(), output_token_ids=[1, 2, 3, 4, 5])
    draft(proposer, first)
    proposer.release("a")
    assert draft(proposer, Request("b", [60, 1, 2], SamplingParams())) == (3, 4, 5)
    assert draft(proposer, Request("c", [50, 51], SamplingParams())) == (), "prompts are not remembered"


def test_outputs_are_remembered_for_requests_with_the_same_salt() -> None:
    proposer = SuffixProposer(remembers_outputs=True)
    for name, output in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8, 9])):  # both at once
        draft(proposer, Request(name, [50, 51], SamplingParams(), output_token_ids=output, cache_salt="mine"))
    proposer.release("a")
    proposer.release("b")
    assert draft(proposer, Request("c", [60, 1, 2], SamplingParams(), cache_salt="mine")) == (3, 4, 5)
    assert draft(proposer, Request("d", [60, 6, 7], SamplingParams(), cache_salt="mine")) == (8, 9)
    for salt in ("", "other"):
        assert draft(proposer, Request(f"e{salt}", [60, 1, 2], SamplingParams(), cache_salt=salt)) == ()


def test_a_long_corpus_is_truncated_and_matches_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.speculation.suffix._MAX_CORPUS_TOKENS", 20)
    proposer = SuffixProposer(remembers_outputs=True)
    standing = Request("standing", [1, 2], SamplingParams())
    for number in range(12):
        draft(proposer, standing)
        name = f"r{number}"
        tokens = [number * 10 + digit for digit in range(8)]
        draft(proposer, Request(name, [500], SamplingParams(), output_token_ids=tokens))
        proposer.release(name)
    assert draft(proposer, Request("old", [0, 1, 2], SamplingParams())) == ()
    assert draft(proposer, Request("new", [113, 114], SamplingParams())) == (115, 116, 117)


def test_the_suffix_method_forgets_earlier_requests_by_default() -> None:
    proposer = SuffixProposer()
    draft(proposer, Request("a", [50, 51], SamplingParams(), output_token_ids=[1, 2, 3, 4, 5]))
    proposer.release("a")
    assert draft(proposer, Request("b", [60, 1, 2], SamplingParams())) == ()


def test_only_the_end_of_a_long_prompt_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.speculation.suffix._MAX_OWN_TOKENS", 10)
    proposer = SuffixProposer(remembers_outputs=True)
    far, near = [1, 2, 3, 4], [11, 12, 13, 14, 20, 21]
    request = Request("a", [*far, *near, 1, 2], SamplingParams())
    assert draft(proposer, request) == ()
    request.output_token_ids += [11, 12]
    assert draft(proposer, request, 3) == (13, 14, 20)
    request.output_token_ids += [30, 1, 2]
    assert draft(proposer, request, 2) == (11, 12), "what it has generated since is learned, all of it"
    proposer.release("a")
    assert draft(proposer, Request("b", [13, 11, 12], SamplingParams())) == (30, 1, 2), "outputs, and nothing else"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_tokens_match_plain_decoding(name: str, temperature: float) -> None:
    """Many repetitive prompts at once, some of which forbid speculation: the same tokens, and drafts were accepted."""
    runner = build_runner(tiny_model(name))
    chance = random.Random(3)
    prompts = [[chance.randrange(3, 9) for _ in range(chance.randrange(4, 40))] for _ in range(10)]

    def generate(controller: SpeculationController | None) -> tuple[list[list[int]], int]:
        blocks = BlockManager(runner.cache.num_blocks, BLOCK_SIZE)
        scheduler = Scheduler(SchedulerLimits(64, 16, 128), blocks)
        engine = Engine(runner, scheduler, SampleAndMatch(), controller)
        requests = []
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=30,
                temperature=temperature,
                seed=index,
                presence_penalty=0.1,
                top_k=6,
                logprobs=1,
                logit_bias=((3, 60.0), (4, 60.0)),  # few tokens to choose from, so that guesses are often right
            )
            method = ("suffix", "ngram", "none")[index % 3]
            requests.append(Request(str(index), prompt, params, arrival_s=index, speculation_method=method))
            scheduler.add(requests[-1])
        accepted = 0
        while scheduler.has_work():
            accepted += sum(output.num_accepted for output in engine.step())
        assert blocks.check([]) == []
        return [request.output_token_ids for request in requests], accepted

    plain, _ = generate(None)
    methods = {"suffix": SuffixProposer(), "ngram": NgramProposer()}
    speculated, num_accepted = generate(Eager(registered(methods, 6), "auto"))
    assert speculated == plain
    assert num_accepted > 0

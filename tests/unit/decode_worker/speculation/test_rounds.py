"""Rounds of traced requests are what the method drafted and the verifier accepted, and tracing changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.request import Request, SamplingParams
from baton.core.rounds import Verdict
from baton.engine.step.overlap import always
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.registry import GRAMMAR
from tests.drafting import engine_over
from tests.engine_runs import build_engine, build_runner, greedy, run
from tests.method_drafts import CHAINS, TREES
from tests.random_schemas import EOS, character_tokenizer
from tests.round_labs import METHODS, NAMES, NUM_TOKENS, Lab, requests_of, run_all
from tests.tiny_drafts import VOCAB
from tests.tiny_models import tiny_model
from tests.toy_proposers import Oracle
from tests.witness import Witness


@pytest.fixture(autouse=True)
def no_measured_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are drafted whole however long a pass took: the number of drawn drafts changes the tokens of an answer."""
    monkeypatch.setattr(DraftPasses, "record", lambda *_: None)


@pytest.mark.parametrize(("method", "config"), METHODS, ids=NAMES)
def test_rounds_are_what_was_drafted_and_accepted(method: str, config: SpeculationConfig, tmp_path: Path) -> None:
    lab = Lab(method, config, tmp_path)
    traced = lab.run(requests_of("traced", traced=True))
    rounds = [found for request in traced for found in lab.check(request)]
    assert {found.method for found in rounds} == {method, ""}
    assert any(len(found.draft) > 1 for found in rounds)
    assert lab.witness.num_accepted > 0 or method == "medusa"  # untrained heads know nothing of the bias
    assert (lab.witness.num_trees > 0) == (config is TREES)


@pytest.mark.parametrize(("method", "config"), METHODS, ids=NAMES)
def test_tracing_changes_no_token(method: str, config: SpeculationConfig, tmp_path: Path) -> None:
    plain = Lab(method, config, tmp_path / "plain")
    answers = [request.output_token_ids for request in plain.run(requests_of("", traced=False))]
    assert all(output.round is None for output in plain.outputs)
    traced = Lab(method, config, tmp_path / "traced").run(requests_of("", traced=True))
    assert [request.output_token_ids for request in traced] == answers


def test_only_traced_requests_of_a_step_have_rounds(tmp_path: Path) -> None:
    lab = Lab("suffix", CHAINS, tmp_path)
    traced, other = lab.run([*requests_of("traced", traced=True)[:1], *requests_of("other", traced=False)[:1]])
    assert max(found.num_sequences for found in lab.check(traced)) == 2
    assert {output.round for output in lab.outputs if output.request_id == other.request_id} == {None}


def test_a_method_that_is_off_has_rounds_without_drafts(tmp_path: Path) -> None:
    lab = Lab("none", CHAINS, tmp_path)
    for request in lab.run(requests_of("r", traced=True)):
        rounds = lab.check(request)
        assert [found.verdicts for found in rounds] == [(Verdict.PLAIN,)] * NUM_TOKENS


def test_an_answer_that_ends_within_accepted_tokens_keeps_their_verdict() -> None:
    runner = build_runner(tiny_model("llama"), decoder="transformers")
    (plain,) = run(build_engine(runner), [[5, 6, 7]], greedy(12))
    place = next(place for place in range(1, 5) if plain.token_ids.index(plain.token_ids[place]) == place)
    engine = engine_over(runner, Oracle({"r": plain.token_ids}, "right"))
    witness = Witness(engine)
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(plain.token_ids[place],))
    outputs = run_all(engine, [Request("r", [5, 6, 7], params, is_traced=True)])
    rounds = witness.check("r", outputs, plain.token_ids[: place + 1])
    assert len(rounds[-1].accepted) > len(rounds[-1].token_ids)
    assert set(rounds[-1].verdicts) == {Verdict.ACCEPTED}


def test_tokens_that_a_grammar_forces_are_drafts_of_the_grammar(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"abc": {"enum": ["x1", "x2"]}}, "required": ["abc"]}
    grammars = GrammarCompiler(character_tokenizer().to_json, VOCAB, {EOS})
    params = SamplingParams(max_tokens=60, temperature=0, grammar=json_grammar(schema))
    request = Request("r", [5, 6], params, frozenset({EOS}), is_traced=True)
    request.grammar = grammars.compile(params.grammar)
    lab = Lab("suffix", CHAINS, tmp_path)
    lab.run([request])
    assert GRAMMAR in {found.method for found in lab.check(request)}


def test_rounds_go_on_after_a_preemption(tmp_path: Path) -> None:
    lab = Lab("suffix", CHAINS, tmp_path, num_blocks=20)
    requests = lab.run(requests_of("r", traced=True))
    assert lab.engine.scheduler.num_preemptions > 0
    for request in requests:
        lab.check(request)


def test_steps_that_were_launched_ahead_have_rounds() -> None:
    runner = build_runner(tiny_model("llama"), decoder="transformers")
    (plain,) = run(build_engine(runner), [[5, 6, 7]], greedy(6))
    request = Request("r", [5, 6, 7], greedy(6), is_traced=True)
    outputs = run_all(build_engine(runner, runs_ahead=always), [request])
    assert [output.round.token_ids for output in outputs if output.round] == [(token,) for token in plain.token_ids]

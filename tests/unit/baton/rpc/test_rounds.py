"""Rounds cross the wire unchanged, damaged ones are refused, and untraced requests send what they always sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.errors import InternalError
from baton.core.queue_priority import QueuePriority
from baton.core.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from baton.core.rounds import MAX_NODES, Round
from baton.core.steps import EngineStep
from baton.rpc.conversions import pack_output, pack_sequence, unpack_sequence
from baton.rpc.rounds import unpack_round
from baton.rpc.wire import worker_pb2

VOCAB_SIZE = 100
TREE = Round((5, 7, 9), "eagle3", (5, 6, 7, 8), (-1, -1, 0, 0), (0, 2), 0.25, 0.5, 3)
OUTPUT = TokenOutput(
    "r",
    (5, 6, 7),
    (TokenLogprobs(-0.5, ((5, -0.5),)),) * 3,
    FinishReason.LENGTH,
    4,
    3,
    2,
    "suffix",
    steps=((EngineStep(9, 1.0, 1.5, 0.5, 0.25, 2, 6, 0), 1),),
)
OUTPUT_BYTES = (
    "0a0c050000000600000007000000120e0d000000bf1207080515000000bf120e0d000000bf1207080515000000bf120e0d000000bf12070805"
    "15000000bf1a066c656e6774682004300338024226080911000000000000f03f19000000000000f83f250000003f2d0000803e300138014002"
    "48064a06737566666978"
)
SEQUENCE_BYTES = (
    "0a0172120c0100000002000000030000001a0404000000221f080811000000000000f03f21000000000000f03f31000000000000f03f70052a"
    "067375666669783214080211000000000000f83f19000000000000004039000000000000d03f420473616c74"
)
"""As they were before there were rounds."""


def message_of(found: Round) -> worker_pb2.TokenBatch:
    output = TokenOutput("r", found.token_ids, num_drafted=len(found.draft), drafted_by=found.method, round=found)
    return worker_pb2.TokenBatch.FromString(pack_output(output).SerializeToString())


def test_untraced_outputs_and_sequences_have_the_same_bytes_as_ever() -> None:
    assert pack_output(OUTPUT).SerializeToString(deterministic=True).hex() == OUTPUT_BYTES
    params = SamplingParams(max_tokens=8, seed=5)
    sequence = pack_sequence("r", [1, 2, 3], params, [4], "suffix", QueuePriority(1, 2.5, 2.0), 0.25, 1.0, "salt")
    assert sequence.SerializeToString(deterministic=True).hex() == SEQUENCE_BYTES
    assert pack_output(replace(OUTPUT, round=TREE)).SerializeToString().hex().startswith(OUTPUT_BYTES)


@pytest.mark.parametrize("is_traced", [False, True])
def test_whether_a_sequence_is_traced_crosses_the_wire(is_traced: bool) -> None:
    sequence = pack_sequence("r", [1], SamplingParams(), is_traced=is_traced)
    assert unpack_sequence(sequence, frozenset(), 0.0).is_traced is is_traced


@pytest.mark.parametrize(
    "found",
    [
        TREE,
        Round((5,), verify_s=0.125),
        Round((5,), "suffix", (5, 6), (-1, 0), (0, 1)),
        Round((5,), "ngram", (6, 7), (-1, 0)),
        Round((9,), "lookahead", (8,) * MAX_NODES, (-1,) * MAX_NODES),
    ],
    ids=["tree", "no draft", "ends within", "all rejected", "largest"],
)
def test_rounds_round_trip(found: Round) -> None:
    assert unpack_round(message_of(found), VOCAB_SIZE) == found


def test_a_batch_without_tokens_has_no_round() -> None:
    assert unpack_round(worker_pb2.TokenBatch(), VOCAB_SIZE) is None


def test_tokens_without_a_round_are_refused() -> None:
    with pytest.raises(InternalError, match="without their round"):
        unpack_round(worker_pb2.TokenBatch(token_ids=[5]), VOCAB_SIZE)


Change = Callable[[worker_pb2.TokenBatch], object]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda batch: batch.round.draft.extend([1] * MAX_NODES), "drafted and 2 accepted tokens"),
        (lambda batch: batch.round.accepted.extend([1, 2, 3]), "4 drafted and 5 accepted"),
        (lambda batch: batch.round.parents.pop(), "4 drafted tokens and 3 parents"),
        (lambda batch: setattr(batch, "num_drafted", 5), "in a batch with 5 drafts"),
        (lambda batch: setattr(batch, "drafted_by", "x" * 65), "more than 64 characters"),
        (lambda batch: batch.round.draft.__setitem__(3, VOCAB_SIZE), "not in the vocabulary"),
        (lambda batch: batch.token_ids.__setitem__(2, 2**32 - 1), "not in the vocabulary"),
        (lambda batch: batch.round.parents.__setitem__(2, 2), "behind its parent"),
        (lambda batch: batch.round.parents.__setitem__(0, -2), "behind its parent"),
        (lambda batch: batch.round.accepted.__setitem__(1, 4), "was not drafted"),
        (lambda batch: batch.round.accepted.__setitem__(0, 1), "no path"),
        (lambda batch: batch.token_ids.__setitem__(1, 8), "not those that were accepted"),
        (lambda batch: batch.token_ids.append(1), "not those that were accepted"),
        (lambda batch: setattr(batch.round, "draft_s", math.nan), "duration"),
        (lambda batch: setattr(batch.round, "verify_s", -1.0), "duration"),
    ],
)
def test_damaged_rounds_are_refused(change: Change, problem: str) -> None:
    batch = message_of(TREE)
    change(batch)
    with pytest.raises(InternalError, match=problem):
        unpack_round(batch, VOCAB_SIZE)
